"""Attention over the rows of a table: one loop over its segments, merged by their lse."""

from typing import Any, cast

import mlx.core as mx

from ..config import H2OConfig
from ..operations.backends import resolve
from ..operations.segments import AttentionRows, masking, merged_attention
from .scores import AttentionCall, biases
from .table import IMPORTANCE, Table
from .views import behind_shared, packed_rows, shared_rows

DECODE_QUERIES = 8
"""Up to this many queries, kernels return output and scores together and read packed rows."""


def attend(
    table: Table,
    config: H2OConfig,
    asked: AttentionCall,
    newest: tuple[mx.array, mx.array] | None,
    whole: bool,
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """The output; also scores and lse, unless attention has accumulated them itself.

    Args:
        newest: in mixed precision the dense keys and values, read along with the packed rows.
        whole: whether ``keys`` are the stored heads, with neither padding nor speculation.
    """
    policy, (queries, keys, values, scale, mask, sinks) = config.policy, asked
    packed = isinstance(keys, tuple)
    bias = biases(table, keys[0] if packed else keys)
    # Rows read in stored form are in their frame, so their logits lack a shift.
    frame = table.frame if packed or newest is not None else None
    shift = None
    if frame is not None:
        if sinks is not None or (policy.needs_scores and not policy.needs_weights):
            shift = frame.shift(queries, scale)
        queries = frame.rotate(queries)
    whole = whole and table.prefix is None and len(table.segments) == 1
    more = table.tail.packing if packed or isinstance(values, tuple) else {}
    if policy.kind and whole and (shift is None or (mask is None and sinks is None)):
        causal, shown = masking(mask)
        shown = shown if shift is None else shift  # one shift for all rows of a query
        out, table.beside[IMPORTANCE] = resolve().attention_and_accumulate(
            queries, keys, values, table.beside[IMPORTANCE], scale=scale, decay=policy.decay,
            causal=causal, mask=shown, sinks=sinks, row_bias=bias, **more,
        )  # fmt: skip
        table.unscored = False
        return out if frame is None else frame.back(out, 1), None, None
    segments = shared_rows(table, framed=frame is not None)
    if newest is None:
        segments.append(AttentionRows(keys, values, more))
    else:
        segments += packed_rows(table)
        segments += [AttentionRows(*newest, {})] if newest[0].shape[2] else []
    out, scores, lse = merged_attention(
        segments, queries, scale=scale, mask=mask, sinks=sinks if shift is None else None,
        return_scores=policy.needs_scores, return_lse=shift is not None, row_bias=bias,
    )  # fmt: skip
    out = out if frame is None else frame.back(out, 1)
    if shift is None:
        return out, scores, lse
    lse = cast(mx.array, lse) + shift.squeeze(-1)
    scores = None if scores is None else scores + shift
    if sinks is None:
        return out, scores, lse
    total = mx.logaddexp(lse, sinks.astype(mx.float32)[:, None])
    share = mx.expand_dims(mx.exp(lse - total), -1)  # of the rows, beside the sinks
    return (out * share).astype(out.dtype), scores, total


def without_scores(asked: AttentionCall) -> mx.array:
    """The output for few queries over arrays: by the native back end, which is faster, or MLX."""
    rows, (scale, mask, sinks), operations = asked[:3], asked[3:], cast(Any, resolve())
    if operations.name != "native":
        return mx.fast.scaled_dot_product_attention(*rows, scale=scale, mask=mask, sinks=sinks)
    causal, shown = masking(mask)
    out: mx.array = operations.output(*rows, scale=scale, causal=causal, mask=shown, sinks=sinks)
    return out


def attend_chunk(table: Table, asked: AttentionCall) -> mx.array:
    """The output for any number of queries, over the shared rows and the own ones as arrays, joined
    for this call only. MLX's own attention computes it, unless rows have been folded."""
    queries, keys, values, scale, mask, sinks = asked
    bias = biases(table.whole, keys)
    if table.prefix is not None:
        keys, values, mask = behind_shared(table, keys, values, mask)
    given: Any = {"scale": scale, "mask": mask, "sinks": sinks}
    if bias is None:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, **given)
    rows = [AttentionRows(keys, values, {})]
    return merged_attention(rows, queries, return_scores=False, row_bias=bias, **given)[0]
