"""Random cases of the operations on a cache's rows, and of the scores of a long chunk."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

import reference
import reference_turbo
from golden.build import DTYPES, Case, generator, keep_case, shuffled_positions, spread_scores
from mlx_h2o.config import KV_FORMATS
from mlx_h2o.operations.arguments import CODE_BITS
from mlx_h2o.operations.composed import buffers
from parity.calls import PARTS, Call, drawn_case
from parity.operations import dense_rows, split

# Astride a simdgroup, a threadgroup of the row kernels, and where decode takes a second pass.
LENGTHS = (1, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025)


def row_cases(seed: int) -> Iterator[Case]:
    """Moving averages, evictions of a row, rows written, and scores of chunks."""
    yield from _accumulations(seed)
    yield from _evictions(seed)
    yield from _appends(seed)
    yield from _codes(seed)
    yield from _prefills(seed)


def _accumulations(seed: int) -> Iterator[Case]:
    for index, rows in enumerate(LENGTHS):
        heads = ((2, 1), (4, 2), (6, 2))[index % 3]
        yield accumulate_case(f"accumulate-rows-{rows}", rows=rows, heads=heads, seed=seed)
    for queries in (2, 8, 128):
        yield accumulate_case(f"accumulate-queries-{queries}", queries=queries, seed=seed)
    yield accumulate_case("accumulate-unmasked", masked=0.0, batch=2, seed=seed)
    yield accumulate_case("accumulate-all-masked", masked=1.0, seed=seed)
    yield accumulate_case("accumulate-no-decay", decay=0.0, queries=3, seed=seed)


def accumulate_case(
    name: str, *, rows: int = 40, heads: tuple[int, int] = (4, 2), batch: int = 1,
    queries: int = 1, masked: float = 0.3, decay: float = 0.95, seed: int = 0,
) -> Case:  # fmt: skip
    """C, four rows in ten not scored yet, and scores of which the share ``masked`` is masked."""
    rng = generator(name, seed)
    before = rng.random((batch, heads[1], rows)).astype(np.float32)
    before[rng.random(before.shape) < 0.4] = np.nan
    scores = (rng.standard_normal((batch, heads[0], queries, rows)) * 4).astype(np.float32)
    scores[rng.random(scores.shape) < masked] = -np.inf
    expected = reference.accumulate(before, scores, decay=decay)
    largest = np.abs(scores[np.isfinite(scores)]).max(initial=1.0)
    return drawn_case(
        {"name": name, "op": "accumulate", "decay": decay},
        {"importance": mx.array(before), "scores": mx.array(scores)},
        {"importance": expected},
        {"importance": reference.tolerance(0.0, float(largest), "float32")},
    )


def _evictions(seed: int) -> Iterator[Case]:
    """All rows but one stay: each head has another kind of worst row, and ties of it."""
    worth = ((-np.inf, 0.5), (0.0, -0.0, np.inf), (np.nan, np.nan, 1.0), (0.25, 0.5))
    for rows in LENGTHS:
        name = f"evict-one-rows-{rows}"
        rng = generator(name, seed)
        scores = np.stack([rng.choice(some, rows) for some in worth])[None]
        positions = shuffled_positions(rng, scores.shape)
        positions[:, 3] = np.where(rng.random(rows) < 0.1, -1, positions[:, 3])
        zones = {"sink_size": rows // 8, "recent_start": 2 * rows - rows // 4}
        yield keep_case(name, scores, positions, keep=max(1, rows - 1), **zones)
    for keep in (39, 33):
        name = f"keep-{keep}-of-two-clocks"
        rng = generator(name, seed)
        scores, positions = spread_scores(rng, (2, 2, 40)), shuffled_positions(rng, (2, 2, 40))
        starts = np.array([70, 20])
        yield keep_case(name, scores, positions, keep=keep, sink_size=4, recent_start=starts)


def _appends(seed: int) -> Iterator[Case]:
    packings = (((8, 8), 64), ((4, 4), 32), ((8, 4), 128), ((4, 8), 64), ((6, 3), 32), ((2, 5), 32))
    for index, (bits, group) in enumerate(packings):
        dtype = [*DTYPES][index % 3]
        name = f"append-{bits[0]}.{bits[1]}-g{group}-{dtype}"
        yield append_case(name, bits=bits, group=group, dtype=dtype, count=1, seed=seed)
    for rows in (31, 32, 33):
        yield append_case(f"append-all-{rows}-rows", rows=rows, count=rows, seed=seed)
    for index, kv_format in enumerate(KV_FORMATS):
        dtype = [*DTYPES][index % 3]
        sizes = ((128, 256), (32, 64), (64, 1024))[index % 3]
        yield append_case(f"append-{kv_format}-{dtype}", kv_format=kv_format, group=32, dtype=dtype,
                          sizes=sizes, count=1 + index % 3, seed=seed)  # fmt: skip


def append_case(
    name: str, *, bits: tuple[int, int] = (8, 8), kv_format: str = "", group: int = 64,
    dtype: str = "f32", sizes: tuple[int, int] = (128, 256), rows: int = 40, count: int,
    seed: int = 0,
) -> Case:  # fmt: skip
    """``count`` new rows into slots of packed keys and values; the other rows stay as they are."""
    rng, kind = generator(name, seed), DTYPES[dtype]
    shape = (2, 2, rows)
    slots = np.argsort(rng.random(shape), axis=-1)[..., :count].astype(np.uint32)
    tensors = {"slots": mx.array(slots)}
    expected, tolerance = {}, {}
    bits = KV_FORMATS[kv_format] if kv_format else bits
    for width, own, (side, seed_of) in zip(sizes, bits, reference_turbo.SEEDS.items(), strict=True):
        stored, new = (
            mx.array(rng.standard_normal((*shape[:2], length, width)).astype(np.float32))
            for length in (rows, count)
        )
        parts = 3 if not kv_format or own == 8 else 2 if own else 1
        kept = tuple(buffers.packed(stored.astype(kind), parts, own, group, seed_of))
        for end, array in zip(PARTS[parts], kept, strict=True):
            tensors[f"{side}{end}"] = array
        tensors[f"new_{side}"] = new = new.astype(kind)
        dense = dense_rows(kept, bits=own, group_size=group, side=side)
        wanted, allowed = _as_kept(new, parts, own, side)
        expected |= {f"new_{side}": wanted, f"other_{side}": split(dense, slots)[1]}
        tolerance |= {f"new_{side}": allowed, f"other_{side}": 0.0}
    fields = {"name": name, "op": "append", "bits": (bits[0] or 8, bits[1]), "group_size": group,
              "kv_format": kv_format, "slack": 0}  # fmt: skip
    return drawn_case(fields, tensors, expected, tolerance)


def _as_kept(rows: mx.array, parts: int, bits: int, side: str) -> tuple[np.ndarray, float]:
    """What rows should be in this many parts, and by how much they may be off."""
    if parts == 2:
        options = {"bits": bits, "side": side}
        return reference_turbo.stored(rows, **options), reference_turbo.flips(rows, **options)
    exact = reference.float64(rows)
    if parts == 1:
        return exact, 0.0
    # One step, and the rounding of scale and bias to their dtype.
    largest = float(np.abs(exact).max())
    step = 2 * largest / (2**bits - 1)
    return exact, step + 2 * largest * reference.ULP[reference.dtype_name(rows)]


def _codes(seed: int) -> Iterator[Case]:
    """Every size, bits, dtypes and sides in turn: rows to codes and back."""
    for index, size in enumerate((32, 64, 64, 128, 128, 128, 256, 512, 1024)):
        dtype, bits = [*DTYPES][index // 3], CODE_BITS[index % 3]
        side = [*reference_turbo.SEEDS][index % 2]
        name = f"codes-of-{side}-{size}-{bits}-{dtype}"
        rng = generator(name, seed)
        rows = mx.array(rng.standard_normal((2, 2, 5, size)).astype(np.float32) * 3)
        rows = rows.astype(DTYPES[dtype])
        options = {"bits": bits, "side": side}
        yield drawn_case(
            {"name": name, "op": "codes", "bits": (bits, bits), "group_size": 32, "kind": side},
            {"rows": rows},
            {"rows": reference_turbo.stored(rows, **options)},
            {"rows": reference_turbo.flips(rows, **options)},
        )


def _prefills(seed: int) -> Iterator[Case]:
    case = partial(prefill_case, seed=seed, queries=20)
    for kind in ("ema", "mass"):
        for index, dtype in enumerate(DTYPES):
            causal = "causal" if index else ""
            yield case(f"prefill-{kind}-{causal or 'unmasked'}-{dtype}", kind=kind, dtype=dtype,
                       mask=causal, batch=1 + index % 2)  # fmt: skip
        masked = {"mask": "bool", "sinks": "f32", "empty": True}
        yield case(f"prefill-{kind}-masked-sinks", kind=kind, **masked)
        yield case(f"prefill-{kind}-additive", kind=kind, mask="add-f16")
        yield case(f"prefill-{kind}-bias", kind=kind, bias=True, **masked)
        yield case(f"prefill-{kind}-bias-rows-1025", kind=kind, rows=1025, bias=True, mask="causal")
    few = partial(case, kind="ema", queries=9, mask="causal")
    yield few("prefill-ema-continues", before=True)
    yield few("prefill-ema-last-4-queries", counted=4)
    # Astride the blocks of 2 MiB: of keys, and of queries.
    many = partial(case, heads=(4, 1), mask="causal")
    for rows in (1023, 1025):
        yield many(f"prefill-ema-rows-{rows}", kind="ema", queries=130, rows=rows)
    yield many("prefill-mass-rows-1025", kind="mass", queries=200, rows=1025)


def prefill_case(
    name: str, *, kind: str, before: bool = False, counted: int = reference.EMA_QUERIES,
    seed: int = 0, **given: Any,
) -> Case:  # fmt: skip
    """What a chunk, a ``Call``, says of its keys; ``before`` gives C an earlier value."""
    rng, decay = generator(name, seed), 0.95
    call = Call(**{"sizes": (32, 32), "heads": (4, 2)} | given)
    fields, tensors, _, arguments = call.made(rng)
    del tensors["values"]
    importance = np.full(tensors["keys"].shape[:3], np.nan, np.float32)
    if before:
        importance[..., ::2] = rng.random(importance[..., ::2].shape)
        tensors["importance"] = mx.array(importance)
    inputs = (tensors["queries"], tensors["keys"], tensors["keys"][..., :1])
    exact = reference.attention(*inputs, **arguments)
    allowed = reference.tolerances(*inputs, **arguments, expected=exact)
    if kind == "ema":
        expected = reference.accumulate(importance, exact.scores, decay=decay, queries=counted)
        bound = allowed.scores + reference.tolerance(0.0, np.nanmax(np.abs(expected)), "float32")
    else:
        expected = reference.attention_mass(exact.scores, exact.lse, importance.shape[1])
        # A weight is off by as much, relative, as its logit and the denominator together.
        relative = allowed.scores + allowed.lse
        bound = expected.max() * (relative + 4 * reference.ULP["float32"])
    fields |= {"name": name, "op": "prefill", "kind": kind, "decay": decay, "queries": counted}
    return drawn_case(fields, tensors, {"importance": expected}, {"importance": float(bound)})
