"""How rows are stored: a column for each format, and which ones the settings of a cache ask for."""

import warnings
from collections.abc import Sequence

import mlx.core as mx

from ..config import KV_FORMATS, H2OConfig
from ..operations.arguments import CODE_SIZES, GROUP_SIZES, codes_fit
from ..operations.backends import resolve
from ..operations.composed.turbo import KEYS, VALUES
from .column import Column, DenseColumn, Parts, Segment
from .frame import Frame
from .step import Step
from .table import IMPORTANCE, Table

_warned: set[tuple[int, ...]] = set()


class AffineColumn(Column):
    """Codes of 2 to 8 bits with a scale and a bias per group, from ``mx.quantize``: ``parts`` are
    words, scales and biases."""

    bits: int
    group_size: int

    def __init__(self, bits: int, group_size: int) -> None:
        self.bits = bits
        self.group_size = group_size

    def encode(self, rows: mx.array) -> Parts:
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))

    def decode(self, parts: Parts) -> mx.array:
        words, scales, biases = parts
        width = scales.shape[3] * self.group_size
        none = mx.zeros((*scales.shape[:2], 0, width), scales.dtype)
        if mx.default_device().type != mx.DeviceType.gpu:
            # MLX would make float32 temporaries five times as large as float16 rows.
            return resolve().segment_rows([*parts], none, [self.bits], self.group_size)[0]
        if words.shape[2] == 0:  # MLX refuses empty arrays
            return none
        # MLX has dequantised views of a larger buffer wrongly on some GPUs.
        words, scales, biases = (mx.contiguous(part) for part in parts)
        return mx.dequantize(words, scales, biases, group_size=self.group_size, bits=self.bits)


class TurboColumn(Column):
    """TurboQuant: ``parts`` are words, codes of rotated directions, and norms, as
    ``composed.turbo`` makes them. ``seed`` differs for keys and values, and ``dtype`` is that of
    arriving rows, which codes do not show."""

    bits: int

    def __init__(self, bits: int, seed: int, dtype: mx.Dtype) -> None:
        self.bits = bits
        self.seed = seed
        self.dtype = dtype

    def encode(self, rows: mx.array) -> Parts:
        return resolve().encode_rows(rows, self.bits, self.seed)

    def decode(self, parts: Parts) -> mx.array:
        words, norms = parts
        return resolve().decode_rows(words, norms, self.bits, self.seed, self.dtype)


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
    (keys,), (values,) = table.tail.view()
    dtype, step = mx.result_type(keys, values), Step(table.width, len(table.tokens))
    keys, values = keys.astype(dtype), values.astype(dtype)
    packed = new_table(config, keys, values, step.sequences, owner)
    packed.append(keys, values, step, step.length)
    found = table.arranged(packed.segments, lambda one, _: one)
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
    """Elements that share a scale and a bias, in keys and values of ``sizes``: as ``config`` says,
    or 32 if that does not divide them, with a warning the first time."""
    affine, pair = [], columns(config, 0, mx.float32)[0]
    for side, size, column in zip(("keys", "values"), sizes, pair, strict=True):
        if isinstance(column, TurboColumn) and not codes_fit(size):
            raise ValueError(
                f"[H2OKVCache] {owner} has {side} of {size} elements, and kv_format is "
                f"{config.kv_format!r}: expected a power of two from {CODE_SIZES[0]} to "
                f"{CODE_SIZES[1]}, or kv_bits."
            )
        if isinstance(column, AffineColumn):
            affine.append(size)
    wanted, least = config.kv_group_size, min(GROUP_SIZES)
    if not any(size % wanted for size in affine):
        return wanted
    found = (
        f"[QuantizedH2OKVCache] {owner} has keys of {affine[0]} and values of {affine[-1]} "
        f"elements, which "
    )
    if any(size % least for size in affine):
        raise ValueError(
            f"{found}neither kv_group_size = {wanted} nor {least} divides: expected multiples of "
            f"{least}, or kv_bits=None."
        )
    if (wanted, *affine) not in _warned:
        _warned.add((wanted, *affine))
        message = f"kv_group_size = {wanted} does not divide: groups of {least} are used."
        warnings.warn(found + message, stacklevel=2)
    return least
