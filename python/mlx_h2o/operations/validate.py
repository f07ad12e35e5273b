"""Checks of the arguments of attention and of the selection of rows.

Every error is raised here, before a back end is chosen, so that all of them refuse the same
calls with the same words. Texts begin with the operation's name in brackets, as MLX's do.
"""

from typing import Any

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.arguments import FLOATS as FLOATS
from mlx_h2o.operations.arguments import StreamLike as StreamLike
from mlx_h2o.operations.arguments import dtype_name as dtype_name
from mlx_h2o.operations.requests import AttentionRequest as AttentionRequest
from mlx_h2o.operations.requests import RetentionRequest as RetentionRequest
from mlx_h2o.operations.requests import StoredRows
from mlx_h2o.operations.validate_quantized import check_together, quantized_rows

ATTENTION = "scaled_dot_product_attention_with_scores"

MASK_THRESHOLDS = {dtype: float(mx.finfo(dtype).min) / 2 for dtype in FLOATS}

Shape = tuple[int, ...]


def device_of(stream: StreamLike) -> mx.Device:
    """The device that a call with this ``stream`` argument runs on."""
    if stream is None:
        return mx.default_device()
    return stream.device if isinstance(stream, mx.Stream) else stream


def runs_on_gpu(stream: StreamLike) -> bool:
    """Whether a call with this ``stream`` argument runs on a GPU."""
    return bool(device_of(stream).type == mx.DeviceType.gpu)


def _check_shapes(op: str, queries: Shape, keys: Shape, values: Shape) -> None:
    # Once for what is right, since this runs once per layer and token; then one by one.
    if (
        len(queries) == len(keys) == len(values) == 4
        and keys[:3] == values[:3]
        and (queries[0], queries[3]) == (keys[0], keys[3])
        and not (0 in queries or 0 in keys or 0 in values or queries[1] % keys[1])
    ):
        return
    named = (
        ("queries", queries, "[B, Hq, Lq, D]"),
        ("keys", keys, "[B, Hkv, N, D]"),
        ("values", values, "[B, Hkv, N, Dv]"),
    )
    for name, shape, layout in named:
        arguments.dimensions(op, name, shape, layout)
    for name, shape, layout in named:
        arguments.not_empty(op, name, shape, layout)
    check_together(op, queries, keys, values)


def _check_dtypes(op: str, queries: mx.Dtype, keys: mx.Dtype, values: mx.Dtype) -> None:
    if queries == keys == values and queries in FLOATS:
        return
    for name, dtype in (("queries", queries), ("keys", keys), ("values", values)):
        arguments.floats(op, name, dtype)
    found = ", ".join(map(dtype_name, (queries, keys, values)))
    raise ValueError(
        f"[{op}] queries, keys and values are {found}, expected the same dtype of all three."
    )


def _check_mask(op: str, mask: mx.array, shape: Shape) -> None:
    if mask.dtype != mx.bool_ and mask.dtype not in FLOATS:
        raise ValueError(
            f"[{op}] mask is {dtype_name(mask.dtype)}, "
            "expected bool, or float32, float16 or bfloat16 to add."
        )
    found = mask.shape
    wanted = shape[len(shape) - len(found) :]
    if len(found) > len(shape) or any(
        size not in (1, full) for size, full in zip(found, wanted, strict=True)
    ):
        raise ValueError(
            f"[{op}] mask has shape {found}, "
            f"expected one that broadcasts to [B, Hq, Lq, N] = {shape}."
        )


def _placed_mask(
    op: str, mask: mx.array | str | None, shape: Shape, stream: StreamLike
) -> tuple[bool, float, mx.array | None]:
    """``causal``, ``mask_threshold`` and ``mask`` of a request, from the argument ``mask``."""
    if mask is None:
        return False, 0.0, None
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"[{op}] mask is {mask!r}, expected 'causal', an array or None.")
        return True, 0.0, None
    _check_mask(op, arguments.array(op, "mask", mask), shape)
    threshold = 0.0 if mask.dtype == mx.bool_ else MASK_THRESHOLDS[mask.dtype]
    return False, threshold, mx.broadcast_to(mask, shape, stream=stream)


def _check_sinks(op: str, sinks: mx.array, heads: int) -> None:
    """Raise ValueError where ``sinks`` are not float [Hq]."""
    arguments.floats(op, "sinks", sinks.dtype)
    if sinks.shape != (heads,):
        raise ValueError(f"[{op}] sinks have shape {sinks.shape}, expected [Hq] = ({heads},).")


def _check_row_bias(op: str, bias: mx.array, shape: Shape) -> None:
    if bias.dtype != mx.float32 or bias.shape != shape:
        raise ValueError(
            f"[{op}] row_bias is {arguments.found(bias)}, expected float32 [B, Hkv, N] = {shape}."
        )


def attention_request(
    queries: mx.array,
    keys: Any,
    values: Any,
    *,
    scale: float,
    packed: bool = False,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    row_bias: mx.array | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    sparse_v_threshold: float = 0.0,
    return_scores: bool = True,
    return_lse: bool = False,
    return_skipped: bool = False,
    stream: StreamLike = None,
    op: str = ATTENTION,
) -> AttentionRequest:
    """Check the arguments of attention; ``packed`` rows are tuples of words, scales and biases.

    Raises TypeError and ValueError as ``fast`` documents.
    """
    queries = arguments.array(op, "queries", queries)
    rows: tuple[StoredRows, StoredRows]
    if packed:
        rows = quantized_rows(op, queries, keys, values, bits, v_bits, group_size)
    else:
        keys, values = arguments.array(op, "keys", keys), arguments.array(op, "values", values)
        _check_shapes(op, queries.shape, keys.shape, values.shape)
        _check_dtypes(op, queries.dtype, keys.dtype, values.dtype)
        rows = keys, values
    number = arguments.number(op, "scale", scale)
    sparse = arguments.number(op, "sparse_v_threshold", sparse_v_threshold)
    if not 0 <= sparse < 1:
        raise ValueError(
            f"[{op}] sparse_v_threshold is {sparse}, expected 0 (off) or more, and below 1."
        )
    place = arguments.stream(op, stream)
    shape = (*queries.shape[:3], rows[0].shape[2])
    causal, threshold, pairs = _placed_mask(op, mask, shape, place)
    if sinks is not None:
        _check_sinks(op, arguments.array(op, "sinks", sinks), queries.shape[1])
    if row_bias is not None:
        _check_row_bias(op, arguments.array(op, "row_bias", row_bias), rows[0].shape[:3])
    return AttentionRequest(
        queries=queries,
        keys=rows[0],
        values=rows[1],
        scale=number,
        causal=causal,
        mask=pairs,
        sinks=sinks,
        mask_threshold=threshold,
        sparse_v_threshold=sparse,
        return_scores=bool(return_scores),
        return_lse=bool(return_lse),
        return_skipped=bool(return_skipped),
        stream=place,
        row_bias=row_bias,
    )


def _check_rows(op: str, scores: mx.array, positions: mx.array) -> int:
    for name, array in (("scores", scores), ("positions", positions)):
        arguments.dimensions(op, name, array.shape, "[B, H, N]")
    if scores.shape != positions.shape:
        raise ValueError(
            f"[{op}] scores and positions have shapes {scores.shape} and {positions.shape}, "
            "expected the same."
        )
    arguments.not_empty(op, "scores", scores.shape, "[B, H, N]")
    if scores.dtype != mx.float32:
        raise ValueError(f"[{op}] scores are {dtype_name(scores.dtype)}, expected float32.")
    if positions.dtype != mx.int32:
        raise ValueError(f"[{op}] positions are {dtype_name(positions.dtype)}, expected int32.")
    return int(scores.shape[2])


def retention_request(
    scores: mx.array,
    positions: mx.array,
    keep: int,
    sink_size: int,
    recent_start: int | mx.array | None,
    stream: StreamLike,
) -> RetentionRequest:
    """Check the arguments of ``keep_indices``."""
    op = "keep_indices"
    scores = arguments.array(op, "scores", scores)
    positions = arguments.array(op, "positions", positions)
    rows = _check_rows(op, scores, positions)
    keep = arguments.integer(op, "keep", keep)
    if not 1 <= keep <= rows:
        raise ValueError(f"[{op}] keep is {keep}, expected 1 to N = {rows}.")
    zones = arguments.zones(op, sink_size, recent_start, scores.shape[0])
    return RetentionRequest(scores, positions, rows - keep, *zones, arguments.stream(op, stream))
