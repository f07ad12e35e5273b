"""Which columns the settings of a cache ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from ..config import KV_FORMATS, H2OConfig
from .affine import AffineColumn, group_size_for
from .column import Column, DenseColumn
from .frame import Frame, kept_size
from .table import IMPORTANCE, Segment, Table
from .turbo import KEYS, VALUES, TurboColumn, check_sizes


def new_table(
    config: H2OConfig, keys: mx.array, values: mx.array, count: int, owner: str, scored: bool
) -> Table:
    """A table without rows, of so many sequences, for rows like ``keys`` and ``values``, that are
    ``scored`` or not.

    Raises ValueError, naming ``owner``, for rows that cannot be quantised as ``config`` says.
    """
    size = _group_size(config, keys, values, owner)
    segments = [Segment(*pair, [0] * count) for pair in _columns(config, size, values.dtype)]
    none = [mx.zeros((*rows.shape[:2], 1, rows.shape[3]), rows.dtype) for rows in (keys, values)]
    frame = Frame(none[0], values.shape[3]) if config.framed else None
    kept = none if frame is None else frame.into(*none)
    for one in segments:
        for column, row in zip((one.keys, one.values), kept, strict=True):
            column.parts = tuple(part[:, :, :0] for part in column.encode(row))
    found = Table(segments, [0] * count, frame)
    if scored:
        found.attach(IMPORTANCE)
    return found


def restored_table(
    config: H2OConfig,
    tokens: Sequence[int],
    keys: Any,
    values: Any,
    rows: Sequence[Sequence[int]] | None = None,
    dtype: mx.Dtype = mx.float32,
    value_size: int = 0,
) -> Table:
    """The table that ``state_of`` gave ``keys`` and ``values`` of, whose sequences have seen so
    many ``tokens``, with so many ``rows`` of each in each segment; None: of one, all. ``dtype`` is
    that in which rows came, and ``value_size`` the elements of a value, where what is stored does
    not say them."""
    sides, size = [_parts(keys), _parts(values)], 0
    centre = sides[0].pop() if config.framed else None
    if len(sides[0]) >= 3:
        words, scales = sides[0][:2]
        size = words.shape[3] * 32 // (config.kv_bits or 8) // scales.shape[3]
    frame = None
    if centre is not None:
        frame = Frame(centre, value_size or sides[1][1].shape[3] * size)
    segments, pairs = [], _columns(config, size, dtype)
    for place, pair in enumerate(pairs):
        some = slice(3 * place, None if place == len(pairs) - 1 else 3 * place + 3)
        # Other objects than those given, because they are written in place later.
        own = [
            column.like(tuple(part[...] for part in parts[some]))
            for column, parts in zip(pair, sides, strict=True)
        ]
        count = [own[0].capacity] if rows is None else list(rows[place])
        segments.append(Segment(own[0], own[1], count))
    return Table(segments, tokens, frame)


def stored(table: Table, side: str) -> Any:
    """The "keys", or the "values", in use as they are kept: an array, or words, scales and biases;
    of mixed precision those of each segment."""
    parts = [part for one in table.segments for part in getattr(one, side).view(one.width)]
    return parts[0] if len(parts) == 1 else tuple(parts)


def state_of(table: Table, side: str) -> Any:
    """What ``restored_table`` takes: the same, and behind keys the centre of their frame."""
    rows = stored(table, side)
    return rows if table.frame is None or side == "values" else (*rows, table.frame.centre)


def set_rows(table: Table, name: str, rows: Any) -> None:
    """Put ``rows``, in the form of ``stored``, in the place of the "keys" or of the "values".

    Raises ValueError for rows of other shapes or dtypes.
    """
    parts, before = _parts(rows), _parts(stored(table, name))
    found, expected = ([(part.shape, part.dtype) for part in some] for some in (parts, before))
    if found != expected:
        raise ValueError(f"[H2OKVCache.{name}] found {found}, expected {expected} as stored.")
    for one in table.segments:
        one.read = None
        column = getattr(one, name)
        some, parts = parts[: len(column.parts)], parts[len(column.parts) :]
        column.parts, column.ahead = tuple(part[...] for part in some), 0


def quantized(config: H2OConfig, table: Table, owner: str) -> Table:
    """A copy of a table of dense rows, packed as ``config`` says; errors as ``new_table``."""
    found = table.whole.copy()
    tail, width = found.tail, found.width
    keys, values = tail.keys.view(width)[0], tail.values.view(width)[0]
    columns = _columns(config, _group_size(config, keys, values, owner), values.dtype)[-1]
    if config.framed:
        found.frame = Frame.of(keys, values)
        keys, values = found.frame.into(keys, values)
    packed, others = columns[0].encode(keys), columns[1].encode(values)
    found.segments = [Segment(columns[0].like(packed), columns[1].like(others), tail.rows)]
    for name, array in found.beside.items():
        found.attach(name, array[:, :, :width])
    return found


def unshareable(config: H2OConfig) -> str:
    """What of these settings forbids that rows are shared; empty where nothing does."""
    if config.mixed:
        return "mixed precision, whose rows change"
    if config.speculative:
        return "speculation"
    return "the latent rows of MLA" if config.kv_handed == "latents" else ""


def _parts(rows: Any) -> list[mx.array]:
    return list(rows) if isinstance(rows, tuple | list) else [rows]


def _columns(config: H2OConfig, size: int, dtype: mx.Dtype) -> list[tuple[Column, Column]]:
    """Columns of keys and of values of each segment, in groups of ``size``, of rows that come in
    ``dtype``."""
    pairs: list[tuple[Column, Column]] = []
    if config.mixed:
        bits = cast(int, config.kv_bits)
        pairs.append((AffineColumn(bits, size), AffineColumn(config.v_bits or bits, size)))
    if config.light_bits is not None:
        light = config.light_bits
        pairs.append((AffineColumn(light, size), AffineColumn(light, size)))
    pairs.append(_tail(config, size, dtype))
    for column in (one for pair in pairs for one in pair):
        column.sparse_v = config.sparse_v
    return pairs


def _tail(config: H2OConfig, size: int, dtype: mx.Dtype) -> tuple[Column, Column]:
    if config.kv_format is not None:
        bits, v_bits = KV_FORMATS[config.kv_format]
        keys: Column = TurboColumn(bits, KEYS, dtype)
        if bits in (0, 8):
            keys = AffineColumn(bits, size) if bits else DenseColumn()
        return keys, TurboColumn(v_bits, VALUES, dtype)
    if config.kv_bits is None or config.mixed:
        return DenseColumn(), DenseColumn()
    keys = AffineColumn(config.kv_bits, size)
    if config.kv_handed == "latents":  # rotary parts of keys stay as they are
        return keys, DenseColumn()
    return keys, AffineColumn(config.v_bits or config.kv_bits, size)


def _group_size(config: H2OConfig, keys: mx.array, values: mx.array, owner: str) -> int:
    if config.kv_format is not None:
        bits, width = KV_FORMATS[config.kv_format][0], keys.shape[3]
        check_sizes(config.kv_format, 0 if bits in (0, 8) else width, values.shape[3], owner)
        return group_size_for(config.kv_group_size, width, width, owner) if bits == 8 else 0
    if config.kv_bits is None:
        return 0
    # The values of latent attention are rotary parts, which are not packed.
    width, value_width = keys.shape[3], values.shape[3]
    if config.kv_handed == "latents":
        value_width = width
    if config.framed:
        width, value_width = kept_size(width), kept_size(value_width)
    return group_size_for(config.kv_group_size, width, value_width, owner)
