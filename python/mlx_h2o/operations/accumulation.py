"""What rows accumulate: the moving average of scores that are there, and in one operation with
attention that or the mass of weights.

Re-exported by ``fast``. Each call is validated, then served by the best back end (``backends``).
"""

from typing import Literal

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.arguments import StreamLike, found
from mlx_h2o.operations.backends import resolve, serve
from mlx_h2o.operations.composed import rows as composed_cache
from mlx_h2o.operations.composed.ema import MAX_QUERIES
from mlx_h2o.operations.requests import AccumulateRequest, AttentionAccumulateRequest, Packed
from mlx_h2o.operations.validate import attention_request
from mlx_h2o.operations.validate_quantized import packed_pair


def accumulate_scores(
    importance: mx.array,
    scores: mx.array,
    *,
    decay: float,
    masked: bool = True,
    stream: StreamLike = None,
) -> mx.array:
    """The moving average ``C = a*C + (1-a)*|s|`` of every row, over the queries in order.

    ``s`` is the mean of a row's scores over the unmasked query heads of its KV head. A pair that
    is masked for every head of the group leaves C unchanged, and the first unmasked score of a
    row sets ``C = |s|`` (AtomGradient 2026, sec. 3.2, whose C starts at 0).

    Args:
        importance: C, float32 [B, H, N], NaN where a row has not been scored.
        scores: float32 [B, Hq, Lq, N], -inf (or NaN) where masked; Hq a multiple of H, Lq at
            most 128.
        decay: a, at least 0 and below 1.
        masked: False promises that every score is finite, which saves work on some back ends.
        stream: stream or device to run on.

    Returns:
        float32 [B, H, N]. With one query the arithmetic, and so every bit, is the same on all
        CPU back ends.

    Raises:
        ValueError: shapes, dtypes or a decay other than these.
        TypeError: an argument that is not an array or a number where one is expected.
    """
    op = "accumulate_scores"
    importance = arguments.array(op, "importance", importance)
    scores = arguments.array(op, "scores", scores)
    shape, rows = scores.shape, importance.shape
    if len(shape) != 4 or 0 in shape or scores.dtype != mx.float32:
        raise ValueError(
            f"[{op}] scores are {found(scores)}, expected float32 [B, Hq, Lq, N], "
            "every size at least 1."
        )
    _check_importance(op, importance, shape[0], shape[3])
    if shape[1] % rows[1]:
        raise ValueError(
            f"[{op}] scores have {shape[1]} heads, "
            f"expected a multiple of the {rows[1]} heads of importance."
        )
    _check_queries(op, shape[2])
    place = arguments.stream(op, stream)
    factor = arguments.decay(op, decay)
    request = AccumulateRequest(importance, scores, factor, bool(masked), place)
    return serve(composed_cache.accumulate_scores, request)


def attention_and_accumulate(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    importance: mx.array,
    *,
    scale: float,
    kind: Literal["ema", "mass"] = "ema",
    decay: float = 0.95,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    row_bias: mx.array | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    sparse_v_threshold: float = 0.0,
    stream: StreamLike = None,
) -> tuple[mx.array, mx.array]:
    """Attention whose scores rows accumulate; a back end need not store them.

    ``kind="ema"``: ``scaled_dot_product_attention_with_scores`` followed by ``accumulate_scores``
    with this ``decay``. ``kind="mass"``, the attention mass of Zhang et al. 2023 (H2O): to the
    importance of a row is added the sum, over all queries and over the query heads of its KV head,
    of the weights ``exp(scores - lse)``; NaN, of a row that is not scored, counts as 0, and a query
    that sees nothing adds nothing. Arguments and errors are those of the two operations; at most
    128 queries. ``importance`` has the heads of the keys.
    ``k`` and ``v`` may be packed, each a tuple of words, scales and biases: then it is the
    quantised operation, and ``bits``, ``group_size``, ``v_bits`` and ``sparse_v_threshold`` are
    its arguments.

    Returns:
        ``(out, importance)``: [B, Hq, Lq, Dv] in the dtype of the queries, and float32
        [B, Hkv, N]. Evaluating ``out`` evaluates both.
    """
    op = "attention_and_accumulate"
    k, v = packed_pair(op, k, v)
    if not isinstance(k, tuple) and sparse_v_threshold != 0:
        raise ValueError(
            f"[{op}] sparse_v_threshold is {sparse_v_threshold}, expected 0 with dense rows."
        )
    attention = attention_request(
        q, k, v, scale=scale, packed=isinstance(k, tuple), mask=mask, sinks=sinks,
        row_bias=row_bias, bits=bits, group_size=group_size, v_bits=v_bits,
        sparse_v_threshold=sparse_v_threshold, stream=stream, op=op,
    )  # fmt: skip
    importance = arguments.array(op, "importance", importance)
    batch, heads, rows = attention.keys.shape[:3]
    _check_importance(op, importance, batch, rows)
    if importance.shape[1] != heads:
        raise ValueError(
            f"[{op}] importance has {importance.shape[1]} heads, expected {heads} as the keys."
        )
    _check_queries(op, q.shape[2])
    if kind not in ("ema", "mass"):
        raise ValueError(f"[{op}] kind is {kind!r}, expected 'ema' or 'mass'.")
    factor = arguments.decay(op, decay)
    request = AttentionAccumulateRequest(attention, importance, factor if kind == "ema" else None)
    return resolve(attention.stream, op=op).serve_accumulating(request)


def _check_queries(op: str, count: int) -> None:
    if count > MAX_QUERIES:
        raise ValueError(f"[{op}] found {count} queries, expected at most {MAX_QUERIES}.")


def _check_importance(op: str, importance: mx.array, batch: int, rows: int) -> None:
    shape = importance.shape
    fits = len(shape) == 3 and shape[0] == batch and shape[2] == rows and shape[1] > 0
    if not fits or importance.dtype != mx.float32:
        raise ValueError(
            f"[{op}] importance is {found(importance)}, "
            f"expected float32 [B, H, N] with B = {batch}, N = {rows}."
        )
