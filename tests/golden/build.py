"""Building blocks of parity cases: seeded inputs, and the results of the float64 reference."""

import zlib
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

import reference

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
GRID_GROUP = 32


@dataclass(frozen=True, eq=False)
class Case:
    """One case: its fields (as in the file's metadata, with name and op) and its tensors."""

    fields: dict[str, Any]
    tensors: dict[str, mx.array]

    @property
    def name(self) -> str:
        return str(self.fields["name"])


def generator(name: str, seed: int = 0) -> np.random.Generator:
    """Random numbers of a case; they depend on its name, so that cases can be added freely."""
    return np.random.default_rng([zlib.crc32(name.encode()), seed])


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def bool_mask(
    rng: np.random.Generator, shape: tuple[int, ...], *, empty: tuple[Any, ...] = ()
) -> mx.array:
    """About two thirds true, the first key always; ``empty`` indexes queries that see nothing."""
    mask = rng.random(shape) < 0.67
    mask[..., 0] = True
    if empty:
        mask[empty] = False
    return mx.array(mask)


def additive_mask(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, *,
    masked: tuple[float, ...] = (), nan: tuple[Any, ...] = (), empty: tuple[Any, ...] = (),
) -> mx.array:  # fmt: skip
    """Biases around 0; every third or so is one of ``masked``, but not the first key."""
    bias = rng.standard_normal(shape).astype(np.float32)
    if masked:
        drop = rng.random(shape) < 0.34
        drop[..., 0] = False
        bias = np.where(drop, rng.choice(np.array(masked, np.float32), shape), bias)
    if empty:
        bias[empty] = -np.inf
    if nan:
        bias[nan] = np.nan
    # Float32 finfo.min rounds to -inf in bfloat16 and float16: then it is -inf that masks.
    return mx.array(bias).astype(dtype)


def row_bias(
    rng: np.random.Generator, shape: tuple[int, ...], *, plain: bool = False, nan: bool = False
) -> mx.array:
    """Logarithms of counts; unless ``plain``, every third row or so is masked, but not the first,
    and of several KV heads the last has no other. ``nan``: in the last row of the first head."""
    bias = np.log(rng.integers(1, 9, shape)).astype(np.float32)
    if not plain:
        drop = rng.random(shape) < 0.34
        drop[..., 0] = False
        drop[:, 1:][:, -1:] = True
        bias = np.where(drop, rng.choice(np.float32([reference.LOWEST, -np.inf]), shape), bias)
    if nan:
        bias[0, 0, -1] = np.nan
    return mx.array(bias)


def with_slack(array: mx.array, slack: int) -> mx.array:
    """So many rows behind, that nothing may read."""
    if not slack:
        return array
    poison = 2**32 - 1 if array.dtype == mx.uint32 else np.nan
    shape = (*array.shape[:2], slack, array.shape[3])
    return mx.concatenate([array, mx.full(shape, poison, dtype=array.dtype)], axis=2)


def keep_case(
    name: str, scores: np.ndarray, positions: np.ndarray, *, keep: int, sink_size: int = 0,
    recent_start: int | np.ndarray | None = None,
) -> Case:  # fmt: skip
    """A selection case: rows to keep.

    ``recent_start`` is one for all sequences, or an array of one each, which is a tensor.
    """
    s, p = scores.astype(np.float32), positions.astype(np.int32)
    zones = {"sink_size": sink_size, "recent_start": recent_start}
    tensors = {
        "scores": mx.array(s),
        "positions": mx.array(p),
        "keep": mx.array(reference.keep_indices(s, p, keep=keep, **zones)),
    }
    if isinstance(recent_start, np.ndarray):
        tensors["recent_start"] = mx.array(recent_start.astype(np.int32))
        zones["recent_start"] = None
    return Case({"name": name, "op": "keep", "keep": keep, **zones}, tensors)


def spread_scores(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Scores in random order whose gaps (1/64) are far above every tolerance."""
    rows = shape[-1]
    levels = (np.arange(rows) - rows // 2) / 64
    return rng.permuted(np.broadcast_to(levels, shape), axis=-1)


def shuffled_positions(rng: np.random.Generator, shape: tuple[int, ...], *, gaps: int = 2):
    """Distinct positions below ``gaps * N``, in an order of its own for each head."""
    heads = np.prod(shape[:-1], dtype=int)
    drawn = [rng.choice(gaps * shape[-1], shape[-1], replace=False) for _ in range(heads)]
    return np.array(drawn).reshape(shape)


def on_grid(rng: np.random.Generator, bits: int, shape: tuple[int, ...]) -> np.ndarray:
    """Rows whose groups span the whole range of their levels: scale and bias are exact."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    levels = rng.integers(low, high + 1, (*shape[:-1], shape[-1] // GRID_GROUP, GRID_GROUP))
    levels[..., 0], levels[..., 1] = low, high
    return levels.reshape(shape) * 2.0 ** (2 - bits)


def trace_case(
    name: str, *, policy: str, zones: tuple[int, int, int] = (4, 32, 28),
    prefill: tuple[int, ...] = (40, 24), steps: int = 300, heads: tuple[int, int] = (4, 2),
    batch: int = 1, size: int = 32, dtype: str = "f16", decay: float = 0.95, replay: bool = False,
    routed: bool = False, fold: bool = True, evict_every: int = 1, context_size: int | None = None,
    bits: tuple[int, int] | None = None, seed: int = 0,
) -> Case:  # fmt: skip
    """A cache trace: chunks of ``prefill``, then ``steps`` single tokens at a fixed budget.

    ``routed``: through the attention that a model is routed to, which may score and average in
    one operation; else attention, then its scores, one after the other.
    With ``bits`` of keys and values the cache quantises, in groups of 32: the rows lie on the grid
    of their packing, so that every machine packs them exactly.
    """
    rng, kind = generator(name, seed), DTYPES[dtype]
    total = sum(prefill) + steps
    # Keys share directions and differ in length, so that heads disagree about what matters.
    themes = rng.standard_normal((heads[1], 6, size))
    keys = themes[:, rng.integers(0, 6, total)] + rng.standard_normal((heads[1], total, size))
    keys = keys[None] * rng.uniform(0.5, 1.5, (batch, heads[1], total, 1))
    tensors = {
        "queries": normal(rng, (batch, heads[0], total, size), kind),
        "keys": mx.array(keys.astype(np.float32)).astype(kind),
        "values": normal(rng, (batch, heads[1], total, size), kind),
    }
    if bits:
        for name_of, width in zip(("keys", "values"), bits, strict=True):
            grid = on_grid(rng, width, (batch, heads[1], total, size))
            tensors[name_of] = mx.array(grid.astype(np.float32)).astype(kind)
    if replay:
        recorded = rng.standard_normal((steps, batch, heads[0], total)).astype(np.float32)
        tensors["recorded"] = mx.array(recorded)
    fields = {
        "name": name, "op": "trace", "policy": policy, "max_kv_size": sum(zones),
        "sink_size": zones[0], "heavy_size": zones[1], "recent_size": zones[2], "decay": decay,
        "prefill": list(prefill), "steps": steps, "scale": float(np.float32(size**-0.5)),
        "replay": replay,
    }  # fmt: skip
    beside = {"routed": (routed, False), "fold": (fold, True), "evict_every": (evict_every, 1)}
    beside["context_size"] = context_size, None
    fields |= {name: given for name, (given, usual) in beside.items() if given != usual}
    if bits:
        fields |= {"kv_bits": bits[0], "v_bits": bits[1], "kv_group_size": GRID_GROUP}
    return Case(fields, tensors)
