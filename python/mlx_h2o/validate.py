"""Checks of the operations' arguments, and the validated requests that back ends receive.

Every error is raised here, before a back end is chosen, so that all of them refuse the same
calls with the same words. Texts begin with the operation's name in brackets, as MLX's do.
"""

import math
import numbers
from dataclasses import dataclass

import mlx.core as mx

ATTENTION = "scaled_dot_product_attention_with_scores"

_INT32 = 2**31 - 1
_FLOAT32 = float(mx.finfo(mx.float32).max)

FLOATS: tuple[mx.Dtype, ...] = (mx.float32, mx.float16, mx.bfloat16)

StreamLike = mx.Stream | mx.Device | None


def dtype_name(dtype: mx.Dtype) -> str:
    """``mlx.core.float16`` is ``float16`` in messages."""
    return str(dtype).removeprefix("mlx.core.")


def device_of(stream: StreamLike) -> mx.Device:
    """The device that a call with this ``stream`` argument runs on."""
    if stream is None:
        return mx.default_device()
    return stream.device if isinstance(stream, mx.Stream) else stream


def runs_on_gpu(stream: StreamLike) -> bool:
    """Whether a call with this ``stream`` argument runs on a GPU."""
    return bool(device_of(stream).type == mx.DeviceType.gpu)


@dataclass(frozen=True, eq=False)
class AttentionRequest:
    """One validated attention call. Shapes as in ``fast``; nothing has been copied.

    ``mask`` is already broadcast to [B, Hq, Lq, N] (strides may be 0) and is bool or additive;
    an additive entry at or below ``mask_threshold`` masks its pair. ``causal`` and ``mask``
    exclude each other. Where ``return_scores`` or ``return_lse`` is false the back end may
    return None in that place.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    causal: bool = False
    mask: mx.array | None = None
    sinks: mx.array | None = None
    mask_threshold: float = 0.0
    return_scores: bool = True
    return_lse: bool = False
    stream: StreamLike = None


@dataclass(frozen=True, eq=False)
class RetentionRequest:
    """One validated call of ``keep_indices`` or ``evict_indices``; ``count`` rows are dropped."""

    scores: mx.array
    positions: mx.array
    count: int
    sink_size: int = 0
    recent_start: int | None = None
    stream: StreamLike = None


def _array(op: str, name: str, value: object) -> mx.array:
    if not isinstance(value, mx.array):
        raise TypeError(f"[{op}] {name} must be an mlx.core.array, found {type(value).__name__}.")
    return value


def _integer(op: str, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"[{op}] {name} must be an integer, found {type(value).__name__}.")
    return int(value)


def _stream(op: str, value: object) -> StreamLike:
    if value is None or isinstance(value, mx.Stream | mx.Device):
        return value
    if isinstance(value, mx.DeviceType):
        return mx.Device(value)
    raise TypeError(
        f"[{op}] stream must be None, an mlx.core.Stream or an mlx.core.Device, "
        f"found {type(value).__name__}."
    )


def _number(op: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"[{op}] {name} must be a number, found {type(value).__name__}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    # Every back end holds it in float32.
    if not abs(number) <= _FLOAT32:
        raise ValueError(f"[{op}] {name} is {number}, expected a finite number.")
    return number


def _check_shapes(op: str, queries: mx.array, keys: mx.array, values: mx.array) -> None:
    layouts = {
        "queries": (queries, "[B, Hq, Lq, D]"),
        "keys": (keys, "[B, Hkv, N, D]"),
        "values": (values, "[B, Hkv, N, Dv]"),
    }
    for name, (array, layout) in layouts.items():
        if array.ndim != 4:
            raise ValueError(f"[{op}] {name} have {array.ndim} dimensions, expected 4 {layout}.")
    for name, (array, layout) in layouts.items():
        if 0 in array.shape:
            raise ValueError(
                f"[{op}] {name} are empty: found shape {array.shape}, "
                f"expected every size of {layout} to be at least 1."
            )
    same = (
        ("queries and keys have batch sizes", queries.shape[0], keys.shape[0]),
        ("keys and values have batch sizes", keys.shape[0], values.shape[0]),
        ("queries and keys have head sizes", queries.shape[3], keys.shape[3]),
        ("keys and values have head counts", keys.shape[1], values.shape[1]),
        ("keys and values have lengths", keys.shape[2], values.shape[2]),
    )
    for what, one, other in same:
        if one != other:
            raise ValueError(f"[{op}] {what} {one} and {other}, expected the same.")
    if queries.shape[1] % keys.shape[1]:
        raise ValueError(
            f"[{op}] queries have {queries.shape[1]} heads, "
            f"expected a multiple of the {keys.shape[1]} heads of the keys."
        )


def _check_dtypes(op: str, queries: mx.array, keys: mx.array, values: mx.array) -> None:
    for name, array in (("queries", queries), ("keys", keys), ("values", values)):
        if array.dtype not in FLOATS:
            raise ValueError(
                f"[{op}] {name} are {dtype_name(array.dtype)}, "
                "expected float32, float16 or bfloat16."
            )
    if not queries.dtype == keys.dtype == values.dtype:
        found = ", ".join(dtype_name(a.dtype) for a in (queries, keys, values))
        raise ValueError(
            f"[{op}] queries, keys and values are {found}, expected the same dtype of all three."
        )


def _check_mask(op: str, mask: mx.array, shape: tuple[int, ...]) -> None:
    if mask.dtype != mx.bool_ and mask.dtype not in FLOATS:
        raise ValueError(
            f"[{op}] mask is {dtype_name(mask.dtype)}, "
            "expected bool, or float32, float16 or bfloat16 to add."
        )
    pairs = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.ndim > len(shape) or any(found not in (1, wanted) for found, wanted in pairs):
        raise ValueError(
            f"[{op}] mask has shape {mask.shape}, "
            f"expected one that broadcasts to [B, Hq, Lq, N] = {shape}."
        )


def _check_sinks(op: str, sinks: mx.array, heads: int) -> None:
    if sinks.dtype not in FLOATS:
        raise ValueError(
            f"[{op}] sinks are {dtype_name(sinks.dtype)}, expected float32, float16 or bfloat16."
        )
    if sinks.shape != (heads,):
        raise ValueError(f"[{op}] sinks have shape {sinks.shape}, expected [Hq] = ({heads},).")


def attention_request(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    return_scores: bool = True,
    return_lse: bool = False,
    stream: StreamLike = None,
    op: str = ATTENTION,
) -> AttentionRequest:
    """Check the arguments of attention. Raises TypeError and ValueError as ``fast`` documents."""
    queries = _array(op, "queries", queries)
    keys = _array(op, "keys", keys)
    values = _array(op, "values", values)
    _check_shapes(op, queries, keys, values)
    _check_dtypes(op, queries, keys, values)
    number = _number(op, "scale", scale)
    place = _stream(op, stream)
    batch, heads, length, _ = queries.shape
    shape = (batch, heads, length, keys.shape[2])
    causal, threshold, pairs = False, 0.0, None
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"[{op}] mask is {mask!r}, expected 'causal', an array or None.")
        causal = True
    elif mask is not None:
        _check_mask(op, _array(op, "mask", mask), shape)
        if mask.dtype != mx.bool_:
            threshold = float(mx.finfo(mask.dtype).min) / 2
        pairs = mx.broadcast_to(mask, shape, stream=place)
    if sinks is not None:
        _check_sinks(op, _array(op, "sinks", sinks), heads)
    return AttentionRequest(
        queries=queries,
        keys=keys,
        values=values,
        scale=number,
        causal=causal,
        mask=pairs,
        sinks=sinks,
        mask_threshold=threshold,
        return_scores=bool(return_scores),
        return_lse=bool(return_lse),
        stream=place,
    )


def _check_rows(op: str, scores: mx.array, positions: mx.array) -> int:
    for name, array in (("scores", scores), ("positions", positions)):
        if array.ndim != 3:
            raise ValueError(f"[{op}] {name} have {array.ndim} dimensions, expected 3 [B, H, N].")
    if scores.shape != positions.shape:
        raise ValueError(
            f"[{op}] scores and positions have shapes {scores.shape} and {positions.shape}, "
            "expected the same."
        )
    if 0 in scores.shape:
        raise ValueError(
            f"[{op}] scores are empty: found shape {scores.shape}, "
            "expected every size of [B, H, N] to be at least 1."
        )
    if scores.dtype != mx.float32:
        raise ValueError(f"[{op}] scores are {dtype_name(scores.dtype)}, expected float32.")
    if positions.dtype != mx.int32:
        raise ValueError(f"[{op}] positions are {dtype_name(positions.dtype)}, expected int32.")
    return int(scores.shape[2])


def _retention(
    op: str,
    scores: mx.array,
    positions: mx.array,
    name: str,
    number: int,
    sink_size: int,
    recent_start: int | None,
    stream: StreamLike,
) -> RetentionRequest:
    rows = _check_rows(op, _array(op, "scores", scores), _array(op, "positions", positions))
    number = _integer(op, name, number)
    if not 1 <= number <= rows:
        raise ValueError(f"[{op}] {name} is {number}, expected 1 to N = {rows}.")
    sink_size = _integer(op, "sink_size", sink_size)
    if sink_size < 0:
        raise ValueError(f"[{op}] sink_size is {sink_size}, expected 0 or more.")
    if recent_start is not None:
        recent_start = _integer(op, "recent_start", recent_start)
        # Positions end far below: a limit outside int32 says the same as the nearest one inside.
        recent_start = max(-_INT32, min(recent_start, _INT32))
    count = rows - number if name == "keep" else number
    place = _stream(op, stream)
    return RetentionRequest(scores, positions, count, min(sink_size, _INT32), recent_start, place)


def keep_request(
    scores: mx.array,
    positions: mx.array,
    *,
    keep: int,
    sink_size: int = 0,
    recent_start: int | None = None,
    stream: StreamLike = None,
) -> RetentionRequest:
    """Check the arguments of ``keep_indices``."""
    return _retention(
        "keep_indices", scores, positions, "keep", keep, sink_size, recent_start, stream
    )


def evict_request(
    scores: mx.array,
    positions: mx.array,
    *,
    count: int = 1,
    sink_size: int = 0,
    recent_start: int | None = None,
    stream: StreamLike = None,
) -> RetentionRequest:
    """Check the arguments of ``evict_indices``."""
    return _retention(
        "evict_indices", scores, positions, "count", count, sink_size, recent_start, stream
    )
