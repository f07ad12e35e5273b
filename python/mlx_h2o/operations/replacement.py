"""Eviction in the steady state: a new row over the worst one of each head, and ranks by keys.

Re-exported by ``fast``. Each call is validated, then served by the best back end (``backends``).
"""

from typing import Any, NamedTuple, TypeVar, cast

import mlx.core as mx

from mlx_h2o.operations import arguments, composed_cache
from mlx_h2o.operations.arguments import FLOATS, StreamLike, dtype_name
from mlx_h2o.operations.arguments import found as _found
from mlx_h2o.operations.backends import serve
from mlx_h2o.operations.requests import (
    KeyDiversityRequest,
    Packed,
    PerSequence,
    RankName,
    ReplaceRequest,
)
from mlx_h2o.operations.validate_quantized import packed_pair

K = TypeVar("K", bound=mx.array | Packed)
V = TypeVar("V", bound=mx.array | Packed)

_OP = "replace_worst"
_LAST_POSITION = 2**30 - 1
_RANK_NAMES = ("importance", "age", "key_diversity")


def key_diversity(keys: mx.array, *, stream: StreamLike = None) -> mx.array:
    """Minus the cosine of each key with the mean of the normalised keys of its head.

    Args:
        keys: [B, H, N, D], float32, float16 or bfloat16.
        stream: stream or device to run on.

    Returns:
        float32 [B, H, N]; a key of zeros gets 0. Computed in float32.

    Raises:
        ValueError: another shape or dtype.
        TypeError: ``keys`` is not an array.
    """
    op = "key_diversity"
    keys = arguments.array(op, "keys", keys)
    if keys.ndim != 4 or 0 in keys.shape or keys.dtype not in FLOATS:
        raise ValueError(
            f"[{op}] keys are {_found(keys)}, expected float32, float16 or bfloat16 "
            "[B, H, N, D], every size at least 1."
        )
    request = KeyDiversityRequest(keys, arguments.stream(op, stream))
    return serve(composed_cache.key_diversity, request)


def replace_worst(
    keys: K,
    values: V,
    importance: mx.array,
    positions: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    *,
    position: PerSequence,
    sink_size: int = 0,
    recent_start: PerSequence | None = None,
    ranks: mx.array | RankName | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    stream: StreamLike = None,
) -> tuple[K, V, mx.array, mx.array]:
    """Steady-state eviction: in each head a new row takes the place of the worst one.

    The row is the one that ``evict_indices(ranks, positions, count=1)`` names. Its key and value
    become the new ones, quantised where the rows are; its importance NaN (not yet scored), its
    position ``position``.

    Args:
        keys: [B, H, N, D], float32, float16 or bfloat16; or packed as ``mx.quantize`` packs them:
            a tuple of words, scales and biases.
        values: [B, H, N, Dv], of one of these dtypes; packed where the keys are.
        importance: float32 [B, H, N].
        positions: int32 [B, H, N], distinct within a head; negative: padding.
        new_keys: [B, H, 1, D], the dtype of the keys, or of their scales.
        new_values: [B, H, 1, Dv], the dtype of the values, or of their scales.
        position: of the new row, 0 to 2**30 - 1, or int32 [B]: one for each sequence.
        sink_size: the first positions, which are protected.
        recent_start: the first position of the protected recent window, or int32 [B]; None: no
            window.
        ranks: float32 [B, H, N], or the name of what they would be: "importance" (as None), "age"
            (the oldest row goes), "key_diversity" (the function of this name).
        bits: per element of packed keys, and of packed values unless ``v_bits`` is given.
        group_size: of packed rows.
        v_bits: per element of packed values.
        stream: stream or device to run on.

    Returns:
        keys, values, importance and positions. Evaluating the keys evaluates all. The arrays that
        were passed never change; where nothing else holds them, a back end may write into their
        memory, so that a row costs no copy of the others (native: always; composed: where MLX's
        own scatter does).

    Raises:
        ValueError: shapes, dtypes or numbers other than these.
        TypeError: an argument that is not an array or an integer where one is expected.
    """
    bits, value_bits, group_size = arguments.packing(_OP, bits, v_bits, group_size)
    k, v = packed_pair(_OP, keys, values)
    stored = _layout("keys", k, new_keys, bits, group_size)
    stored_values = _layout("values", v, new_values, value_bits, group_size)
    if stored_values.rows != stored.rows:
        raise ValueError(
            f"[{_OP}] keys and values have shapes {(*stored.rows, stored.width)} and "
            f"{(*stored_values.rows, stored_values.width)}, expected the same [B, H, N]."
        )
    by = "importance" if ranks is None else ranks
    per_row = [("importance", importance, mx.float32), ("positions", positions, mx.int32)]
    if not isinstance(by, str):
        per_row.append(("ranks", by, mx.float32))
    elif by not in _RANK_NAMES:
        raise ValueError(
            f"[{_OP}] ranks are {by!r}, expected an array, None or one of {_RANK_NAMES}."
        )
    for name, array, dtype in per_row:
        _check(name, array, stored.rows, dtype, "[B, H, N]")
    _check_new("keys", new_keys, stored)
    _check_new("values", new_values, stored_values)
    position = arguments.per_sequence(_OP, "position", position, stored.rows[0])
    if isinstance(position, int) and not 0 <= position <= _LAST_POSITION:
        raise ValueError(f"[{_OP}] position is {position}, expected 0 to 2**30 - 1.")
    zones = arguments.zones(_OP, sink_size, recent_start, stored.rows[0])
    request = ReplaceRequest(
        k, v, importance, positions, new_keys, new_values, position, *zones, by,
        arguments.stream(_OP, stream), bits, value_bits, group_size,
    )  # fmt: skip
    found: Any = serve(composed_cache.replace_worst, request)
    return cast("tuple[K, V, mx.array, mx.array]", found)


def _check(
    name: str, array: object, shape: tuple[int, ...], dtype: mx.Dtype, layout: str
) -> mx.array:
    found = arguments.array(_OP, name, array)
    if found.shape != shape or found.dtype != dtype:
        raise ValueError(
            f"[{_OP}] {name} are {_found(found)}, expected {dtype_name(dtype)} {layout} = {shape}."
        )
    return found


class _Layout(NamedTuple):
    """Of stored rows, packed or not: [B, H, N], row size and the dtype of new rows."""

    rows: tuple[int, int, int]
    width: int
    dtype: mx.Dtype


def _layout(name: str, stored: object, new: object, bits: int, group_size: int) -> _Layout:
    if isinstance(stored, tuple):
        return _packed_layout(name, stored, new, bits, group_size)
    array = arguments.array(_OP, name, stored)
    if array.ndim != 4 or 0 in array.shape or array.dtype not in FLOATS:
        raise ValueError(
            f"[{_OP}] {name} are {_found(array)}, expected float32, float16 or bfloat16 "
            "with 4 dimensions, every size at least 1."
        )
    batch, heads, rows, width = array.shape
    return _Layout((batch, heads, rows), width, array.dtype)


def _packed_layout(
    name: str, stored: tuple[object, ...], new: object, bits: int, group_size: int
) -> _Layout:
    if len(stored) != 3:
        raise TypeError(f"[{_OP}] {name} must be a tuple of words, scales and biases.")
    words, scales, biases = (
        arguments.array(_OP, f"{part} of the {name}", array)
        for part, array in zip(("words", "scales", "biases"), stored, strict=True)
    )
    dtype = arguments.array(_OP, f"new_{name}", new).dtype
    if words.ndim != 4 or 0 in words.shape or words.dtype != mx.uint32:
        raise ValueError(
            f"[{_OP}] words of the {name} are {_found(words)}, expected uint32 "
            "[B, H, N, D * bits / 32], every size at least 1."
        )
    batch, heads, rows, packed = words.shape
    width = packed * 32 // bits
    if packed * 32 % bits or width % group_size:
        raise ValueError(
            f"[{_OP}] words of the {name} have {packed} words per row, which at {bits} bits is "
            f"not a multiple of the group size {group_size}."
        )
    expected = (batch, heads, rows, width // group_size)
    for part, array in (("scales", scales), ("biases", biases)):
        if array.shape != expected or array.dtype != dtype or array.dtype not in FLOATS:
            raise ValueError(
                f"[{_OP}] {part} of the {name} are {_found(array)}, "
                f"expected {expected} in the dtype of the new rows, {dtype_name(dtype)}."
            )
    return _Layout((batch, heads, rows), width, dtype)


def _check_new(name: str, new: object, stored: _Layout) -> None:
    row = arguments.array(_OP, f"new_{name}", new)
    expected = (*stored.rows[:2], 1, stored.width)
    if row.shape != expected or row.dtype != stored.dtype:
        raise ValueError(
            f"[{_OP}] new {name} are {_found(row)}, expected "
            f"{dtype_name(stored.dtype)} {expected} as the {name}."
        )
