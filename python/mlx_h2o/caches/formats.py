"""Which columns the settings of a cache ask for."""

from collections.abc import Sequence

import mlx.core as mx

from ..config import KV_FORMATS, H2OConfig
from .affine import AffineColumn, group_size_for
from .column import Column, DenseColumn, Segment
from .frame import Frame
from .step import Step
from .table import IMPORTANCE, Table
from .turbo_column import KEYS, VALUES, TurboColumn, check_size


def new_table(config: H2OConfig, keys: mx.array, values: mx.array, count: int, owner: str) -> Table:
    """An empty table of ``count`` sequences, for rows like ``keys`` and ``values``.

    Raises ValueError, naming ``owner``, for rows that cannot be quantised as ``config`` says.
    """
    kept = [mx.zeros((*rows.shape[:2], 1, rows.shape[3]), rows.dtype) for rows in (keys, values)]
    frame = Frame(kept) if config.framed else None
    if frame is not None:
        kept = [*frame.into(*kept)]
    size = _group_size(config, [row.shape[3] for row in kept], owner)
    segments = []
    for pair in columns(config, size, values.dtype):
        both = [column.encode(row) for column, row in zip(pair, kept, strict=True)]
        none = [[part[:, :, :0] for part in parts] for parts in both]
        segments.append(Segment(*pair, none, [0] * count))
    found = Table(segments, [0] * count, frame)
    if config.policy.needs_scores:
        found.attach(IMPORTANCE)
    return found


def quantized(config: H2OConfig, table: Table, owner: str) -> Table:
    """A copy of a table of dense rows, packed as ``config`` says; errors as in ``new_table``."""
    if table.prefix_rows + table.width == 0:  # also if all rows were taken back
        return Table([], [*table.tokens])
    table = table.whole
    (keys,), (values,) = table.tail.state
    dtype, step = mx.result_type(keys, values), Step(table.width, len(table.tokens))
    keys, values = keys.astype(dtype), values.astype(dtype)
    packed = new_table(config, keys, values, step.sequences, owner)
    packed.append(keys, values, step, step.length)
    found = table.arranged(packed.segments, lambda one, _: one[:, :, : step.length])
    found.frame = packed.frame
    return found


def unshareable(config: H2OConfig) -> str:
    """Why rows cannot be shared with these settings; empty if they can."""
    if config.light_bits is not None:
        return "mixed precision, whose rows change"
    if config.speculative:
        return "speculation"
    return "the latent rows of MLA" if config.kv_handed == "latents" else ""


def columns(config: H2OConfig, size: int, dtype: mx.Dtype) -> list[tuple[Column, Column]]:
    """Columns of keys and values of each segment, for groups of ``size`` elements and rows that
    arrive in ``dtype``."""

    def of(bits: int | None) -> Column:
        return AffineColumn(bits, size) if bits else DenseColumn()

    bits, v_bits, light = config.kv_bits, config.v_bits or config.kv_bits, config.light_bits
    pairs = [(of(bits), of(v_bits))]
    if config.kv_format is not None:
        bits, v_bits = KV_FORMATS[config.kv_format]
        keys = of(bits) if bits in (0, 8) else TurboColumn(bits, KEYS, dtype)
        pairs = [(keys, TurboColumn(v_bits, VALUES, dtype))]
    elif config.mixed:
        pairs += [(of(light), of(light))] if light else []
        pairs.append((of(None), of(None)))
    elif config.kv_handed == "latents":  # rotary parts of keys are not packed
        pairs = [(of(bits), of(None))]
    for column in (one for pair in pairs for one in pair):
        column.sparse_v = config.sparse_v
    return pairs


def _group_size(config: H2OConfig, sizes: Sequence[int], owner: str) -> int:
    """Elements that share a scale and a bias, in keys and values of ``sizes``; 0 if none do."""
    affine, pair = [], columns(config, 0, mx.float32)[0]
    for side, size, column in zip(("keys", "values"), sizes, pair, strict=True):
        if isinstance(column, TurboColumn):
            check_size(config.kv_format, side, size, owner)
        affine += [size] if isinstance(column, AffineColumn) else []
    return group_size_for(config.kv_group_size, affine, owner) if affine else 0
