"""Reading and writing rows in the slots of arrays [B, H, N] or [B, H, N, width].

Only ``append_rows`` changes an array that was passed; all other results are new objects.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.requests import Parts

Encode = Callable[[mx.array, int, int], Parts]
"""Makes codes from rows, bits and a seed, like ``turbo.encode_rows``."""


def gathered(array: mx.array, slots: mx.array) -> mx.array:
    """The rows at ``slots`` [B, H, n]."""
    return mx.take_along_axis(array, wide(slots, array), axis=2)


def put_rows(buffer: mx.array, slots: mx.array, rows: mx.array) -> mx.array:
    """``buffer`` with ``rows`` at ``slots`` [B, H, n], in place if nothing else holds it."""
    return mx.put_along_axis(buffer, wide(slots, buffer), rows, axis=2)


def put_each(buffers: list[mx.array], slots: mx.array, rows: list[mx.array]) -> list[mx.array]:
    """``put_rows`` for several buffers: rows [B, H, n, width] at ``slots`` [B, 1, n, 1]."""
    pairs = zip(buffers, rows, strict=True)
    return [mx.put_along_axis(buffer, slots, new, axis=2) for buffer, new in pairs]


def append_rows(buffers: list[mx.array], rows: list[mx.array], start: int) -> list[mx.array]:
    """Write new rows [B, H, L, width] from slot ``start`` on. Returns the buffers, written in place
    if nothing else holds them, and then the first ``start + L`` slots of each.
    """
    end = start + rows[0].shape[2]
    for buffer, new in zip(buffers, rows, strict=True):
        buffer[:, :, start:end] = new
    return [*buffers, *first_slots(buffers, end)]


def first_slots(buffers: Sequence[mx.array], count: int) -> list[mx.array]:
    """The first ``count`` slots of each buffer; always other arrays."""
    return [mx.split(buffer, [count], 2)[0] for buffer in buffers]  # slices take longer


def quantize_append(
    keys: Parts,
    values: Parts,
    new_keys: mx.array,
    new_values: mx.array,
    slots: mx.array,
    *,
    bits: int,
    group_size: int,
    v_bits: int,
    encode: Encode = turbo.encode_rows,
) -> list[mx.array]:
    """Pack the new rows, with ``encode`` if they become codes, and scatter each part into its slots
    by MLX's own operation. Returns the arrays of the keys, then of the values."""
    new = [
        *packed(new_keys, len(keys), bits, group_size, turbo.KEYS, encode),
        *packed(new_values, len(values), v_bits, group_size, turbo.VALUES, encode),
    ]
    slots = mx.minimum(slots, mx.array(keys[0].shape[2] - 1, mx.uint32))
    pairs = zip((*keys, *values), new, strict=True)
    first, *others = (put_rows(stored, slots, part) for stored, part in pairs)
    # Tied together, since the graph of an array that nobody reads would grow.
    return [mx.depends(first, others), *others]


def packed(
    rows: mx.array,
    parts: int,
    bits: int,
    group_size: int,
    seed: int,
    encode: Encode = turbo.encode_rows,
) -> Sequence[mx.array]:
    """Rows in as many ``parts`` as they are stored in; ``encode`` makes the codes."""
    if parts == 1:
        return [rows]
    if parts == 2:
        return encode(rows, bits, seed)
    return mx.quantize(rows, group_size=group_size, bits=bits)


def padded(array: mx.array, length: int, fill: float) -> mx.array:
    """The array extended by ``fill`` to at least ``length`` slots; always another array."""
    missing = length - array.shape[2]
    if missing <= 0:
        return mx.contiguous(array)
    shape = (*array.shape[:2], missing, *array.shape[3:])
    return mx.concatenate([array, mx.full(shape, fill, array.dtype)], axis=2)


def wide(slots: mx.array, array: mx.array) -> mx.array:
    """``slots`` with as many axes as ``array``, as indices of its rows."""
    return slots if slots.ndim == array.ndim else mx.expand_dims(slots, 3)
