"""Which columns the settings of a cache ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_map

from ..config import H2OConfig
from .affine import AffineColumn, group_size_for
from .column import Column, DenseColumn, Parts
from .table import Segment, Table

__all__ = ["new_table", "quantized", "restored_table", "set_rows", "stored"]


def new_table(config: H2OConfig, keys: mx.array, values: mx.array, lines: int, owner: str) -> Table:
    """A table without rows, for rows like ``keys`` and ``values``.

    Raises ValueError, naming ``owner``, for rows that cannot be quantised as ``config`` says.
    """
    segments = []
    size = _group_size(config, keys, values, owner)
    for bits in _tier_bits(config):
        columns = [AffineColumn(one, size) for one in bits]
        for column, rows in zip(columns, (keys, values), strict=True):
            one = mx.zeros((*rows.shape[:2], 1, rows.shape[3]), rows.dtype)
            column.parts = tuple(part[:, :, :0] for part in column.encode(one))
        segments.append(Segment(columns[0], columns[1], [0] * lines))
    segments.append(Segment(*_tail(config, size), [0] * lines))
    return Table(segments)


def restored_table(
    config: H2OConfig, keys: Any, values: Any, rows: Sequence[Sequence[int]] | None = None
) -> Table:
    """The table whose ``stored`` gave ``keys`` and ``values``, with so many ``rows`` of each line
    in each segment; None: of one line, all."""
    keys, values = tree_map(lambda array: array[...], (keys, values))  # written in place later
    pairs: list[tuple[Column, Column]] = []
    for place, (bits, v_bits) in enumerate(_tier_bits(config)):
        some = slice(3 * place, 3 * place + 3)
        pairs.append((_packed(bits, tuple(keys[some])), _packed(v_bits, tuple(values[some]))))
    if pairs:
        pairs.append((DenseColumn((keys[-1],)), DenseColumn((values[-1],))))
    else:
        parts: list[Parts] = [
            tuple(side) if isinstance(side, tuple | list) else (side,) for side in (keys, values)
        ]
        size = 0 if config.kv_bits is None else _packed(config.kv_bits, parts[0]).group_size
        like = _tail(config, size)
        pairs.append((like[0].like(parts[0]), like[1].like(parts[1])))
    counts = [[pair[0].capacity] for pair in pairs] if rows is None else rows
    return Table([Segment(*pair, list(own)) for pair, own in zip(pairs, counts, strict=True)])


def stored(table: Table) -> tuple[Any, Any]:
    """Keys and values of the rows in use as they are kept: an array, or words, scales and biases;
    of mixed precision those of each segment."""
    sides = []
    for side in ("keys", "values"):
        parts = [part for one in table.segments for part in getattr(one, side).view(one.width)]
        sides.append(parts[0] if len(parts) == 1 else tuple(parts))
    return sides[0], sides[1]


def set_rows(table: Table, name: str, rows: Any) -> None:
    """Put ``rows``, in the form of ``stored``, in the place of the "keys" or of the "values".

    Raises ValueError for rows of other shapes or dtypes.
    """
    parts = list(rows) if isinstance(rows, tuple | list) else [rows]
    before = [part for one in table.segments for part in getattr(one, name).view(one.width)]
    found, expected = ([(part.shape, part.dtype) for part in some] for some in (parts, before))
    if found != expected:
        raise ValueError(f"[H2OKVCache.{name}] found {found}, expected {expected} as stored.")
    table.memo.clear()
    for one in table.segments:
        column = getattr(one, name)
        some, parts = parts[: len(column.parts)], parts[len(column.parts) :]
        column.parts = tuple(part[...] for part in some)


def quantized(config: H2OConfig, table: Table, owner: str) -> Table:
    """The rows of a dense table, quantised as ``config`` says; errors as ``new_table``."""
    keys, values = table.dense("keys"), table.dense("values")
    found = new_table(config, keys[:, :, :1], values[:, :, :1], table.lines, owner)
    for column, rows in ((found.tail.keys, keys), (found.tail.values, values)):
        column.append(0, rows, rows.shape[2])
    found.tail.rows = list(table.tail.rows)
    found.share_positions(table)
    for name, array in table.beside.items():
        found.attach(name, array[:, :, : table.width], table.fills[name])
    return found


def _tier_bits(config: H2OConfig) -> list[tuple[int, int]]:
    """Bits of keys and of values of each packed segment of mixed precision."""
    if not config.mixed:
        return []
    bits = cast(int, config.kv_bits)
    tiers = [(bits, config.v_bits or bits)]
    return tiers if config.light_bits is None else [*tiers, (config.light_bits,) * 2]


def _tail(config: H2OConfig, size: int) -> tuple[Column, Column]:
    if config.kv_bits is None or config.mixed:
        return DenseColumn(), DenseColumn()
    keys = AffineColumn(config.kv_bits, size)
    if config.kv_handed == "latents":  # rotary parts of keys stay as they are
        return keys, DenseColumn()
    return keys, AffineColumn(config.v_bits or config.kv_bits, size)


def _packed(bits: int, parts: Parts) -> AffineColumn:
    """A column of these parts, whose shapes tell the size of a group."""
    width, groups = parts[0].shape[-1] * 32 // bits, parts[1].shape[-1]
    return AffineColumn(bits, width // groups, parts)


def _group_size(config: H2OConfig, keys: mx.array, values: mx.array, owner: str) -> int:
    if config.kv_bits is None:
        return 0
    # The values of latent attention are rotary parts, which are not packed.
    width = (keys if config.kv_handed == "latents" else values).shape[3]
    return group_size_for(config.kv_group_size, keys.shape[3], width, owner)
