"""Which columns the settings of a cache ask for."""

import mlx.core as mx

from ..config import KV_FORMATS, H2OConfig
from .affine import AffineColumn, group_size_for
from .column import Column, DenseColumn
from .frame import Frame, kept_size
from .step import Step
from .table import IMPORTANCE, Segment, Table
from .turbo_column import KEYS, VALUES, TurboColumn, check_sizes


def new_table(config: H2OConfig, keys: mx.array, values: mx.array, count: int, owner: str) -> Table:
    """An empty table of ``count`` sequences, for rows like ``keys`` and ``values``.

    Raises ValueError, naming ``owner``, for rows that cannot be quantised as ``config`` says.
    """
    size = _group_size(config, keys, values, owner)
    kept = [mx.zeros((*rows.shape[:2], 1, rows.shape[3]), rows.dtype) for rows in (keys, values)]
    frame = Frame(kept[0], values.shape[3]) if config.framed else None
    if frame is not None:
        kept = [*frame.into(*kept)]
    segments = [Segment(*pair, [0] * count) for pair in columns(config, size, values.dtype)]
    for one in segments:
        for column, row in zip((one.keys, one.values), kept, strict=True):
            column.parts = tuple(part[:, :, :0] for part in column.encode(row))
    found = Table(segments, [0] * count, frame)
    if config.policy.needs_scores:
        found.attach(IMPORTANCE)
    return found


def quantized(config: H2OConfig, table: Table, owner: str) -> Table:
    """A copy of a table of dense rows, packed as ``config`` says; errors as in ``new_table``."""
    if not table.segments:
        return table.copy()
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
