"""Cases of a decode step: attention with the moving average, rows in the place of others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

import reference
from golden.build import DTYPES, Case, generator, shuffled_positions
from parity.operations import split
from parity.row_cases import drawn_case, spread_scores

# Bits of keys and of values, and the group; None: dense.
PACKINGS = (None, ((8, 8), 64), ((4, 8), 32), ((8, 4), 64))


def step_cases(seed: int) -> Iterator[Case]:
    """Every packing with one query and several, in one pass and in two; then replacements."""
    each = itertools.product(PACKINGS, (37, 1030), (False, True))
    for index, (packing, rows, named) in enumerate(each):
        dtype = [*DTYPES][index % 3]
        yield attend_case(
            f"attend-{_of(packing)}-{rows}{'-worst' * named}-{dtype}", packing=packing, rows=rows,
            queries=1 + 2 * (index % 2), mask="causal" if index % 4 else "", named=named,
            sinks=bool(index % 3), dtype=dtype, seed=seed,
        )  # fmt: skip
    replacements = itertools.product(PACKINGS, (False, True), (False, True))
    for index, (packing, known, counted) in enumerate(replacements):
        dtype = [*DTYPES][index % 3]
        kinds = f"{'-known' * known}{'-statistics' * counted}"
        yield replacement_case(
            f"replacement-{_of(packing)}{kinds}-{dtype}", packing=packing, known=known,
            counted=counted, dtype=dtype, seed=seed,
        )  # fmt: skip
    for rows in (1, 31, 32, 33, 257):
        yield replacement_case(
            f"replacement-rows-{rows}", packing=PACKINGS[rows % 2], rows=rows, counted=True,
            seed=seed,
        )  # fmt: skip


def _of(packing: Any) -> str:
    return "dense" if packing is None else f"{packing[0][0]}.{packing[0][1]}-g{packing[1]}"


def _stored(
    rng: np.random.Generator, packing: Any, shape: tuple[int, ...], kind: mx.Dtype
) -> tuple[dict[str, mx.array], list[np.ndarray]]:
    """Tensors of keys and values, and what they are in float64; values are twice as wide."""
    tensors: dict[str, mx.array] = {}
    live = []
    for side, name in enumerate(("keys", "values")):
        wide = rng.standard_normal((*shape, 64 * (1 + side))).astype(np.float32)
        rows = mx.array(wide).astype(kind)
        if packing is None:
            tensors[name] = rows
            live.append(reference.float64(rows))
            continue
        bits, group = packing[0][side], packing[1]
        packed = mx.quantize(rows, group_size=group, bits=bits)
        live.append(reference.dequantized(*packed, bits=bits, group_size=group))
        for part, array in zip(("words", "scales", "biases"), packed, strict=True):
            tensors[f"{name}_{part}"] = array
    return tensors, live


def _fields(name: str, op: str, packing: Any, **others: Any) -> dict[str, Any]:
    bits, group = packing or (None, 64)
    fields = {"name": name, "op": op, "bits": bits, "group_size": group, "slack": 0}
    return fields | {"sparse_v_threshold": 0.0} | others


def attend_case(
    name: str,
    *,
    packing: Any,
    rows: int,
    queries: int,
    mask: str,
    named: bool,
    sinks: bool,
    dtype: str,
    seed: int,
) -> Case:
    """Attention that takes its scores into C; ``named``: and names the next row to go."""
    zones = {"sink_size": 3, "recent_start": rows - rows // 4}
    scale, decay = float(np.float32(64**-0.5)), 0.9
    for attempt in itertools.count():
        rng = generator(f"{name}-{attempt}", seed)
        tensors, live = _stored(rng, packing, (2, 2, rows), DTYPES[dtype])
        q = rng.standard_normal((2, 4, queries, 64)).astype(np.float32)
        tensors["queries"] = mx.array(q).astype(DTYPES[dtype])
        arguments: dict[str, Any] = {"scale": scale, "mask": mask or None, "sinks": None}
        if sinks:
            drawn = rng.standard_normal(4).astype(np.float32)
            arguments["sinks"] = tensors["sinks"] = mx.array(drawn).astype(DTYPES[dtype])
        before = rng.random((2, 2, rows)).astype(np.float32) * 3
        before[rng.random(before.shape) < 0.2] = np.nan
        positions = shuffled_positions(rng, before.shape).astype(np.int32) % (2**20)
        exact = reference.attention(tensors["queries"], *live, **arguments)
        importance = reference.accumulate(before, exact.scores, decay=decay)
        worst = reference.evict_indices(importance, positions, **zones)
        following = reference.evict_indices(importance, positions, count=2, **zones)
        pairs = np.take_along_axis(importance, following.astype(np.int64), axis=2)
        # A back end that is within its tolerance names the same row.
        if not named or (np.diff(pairs, axis=2) > 1e-4).all():
            break
    narrow = [mx.array(a.astype(np.float32)) for a in live]
    allowed = reference.tolerances(tensors["queries"], *narrow, **arguments, expected=exact)
    size = float(np.nanmax(np.abs(importance)))
    tensors |= {"importance": mx.array(before)}
    expected = {"out": exact.out, "importance": importance}
    tolerance = {
        "out": allowed.out,
        "importance": allowed.scores + reference.tolerance(0.0, size, "float32"),
    }
    if named:
        tensors["positions"] = mx.array(positions)
        expected["worst"], tolerance["worst"] = worst[..., 0], 0.0
    fields = _fields(name, "attend", packing, scale=scale, mask=mask, decay=decay, **zones)
    return drawn_case(fields, tensors, expected, tolerance)


def replacement_case(
    name: str,
    *,
    packing: Any,
    rows: int = 40,
    known: bool = False,
    counted: bool = False,
    dtype: str = "f32",
    seed: int = 0,
) -> Case:
    """A new row for the worst, or for one that is ``known``; ``counted``: with key statistics.

    Back ends may pack a row apart, so the statistics are held to the keys that came out.
    """
    rng = generator(name, seed)
    shape, position = (2, 2, rows), 3 * rows
    tensors, live = _stored(rng, packing, shape, DTYPES[dtype])
    new, _ = _stored(rng, None, (2, 2, 1), DTYPES[dtype])
    importance = spread_scores(rng, shape).astype(np.float32)
    positions = shuffled_positions(rng, shape).astype(np.int32)
    zones = {"sink_size": min(4, rows - 1), "recent_start": None}
    slots = reference.evict_indices(importance, positions, **zones)
    if known:
        slots = rng.integers(0, rows, slots.shape).astype(np.uint32)
        tensors["worst"] = mx.array(slots[..., 0])
    tensors |= {f"new_{side}": array for side, array in new.items()}
    tensors |= {"importance": mx.array(importance), "positions": mx.array(positions)}
    tensors["slots"] = mx.array(slots)
    expected: dict[str, np.ndarray] = {}
    tolerance: dict[str, float] = {}
    for side, (of, dense) in enumerate(zip(("keys", "values"), live, strict=True)):
        written = reference.float64(new[of])
        expected |= {f"new_{of}": written, f"other_{of}": split(dense, slots)[1]}
        tolerance |= {f"new_{of}": 0.0, f"other_{of}": 0.0}
        if packing is not None:
            # One step, and the rounding of scale and bias to their dtype.
            largest = float(np.abs(written).max())
            step = 2 * largest / (2 ** packing[0][side] - 1)
            rounding = 2 * largest * reference.ULP[reference.dtype_name(new[of])]
            tolerance[f"new_{of}"] = step + rounding
    at = slots.astype(np.int64)
    marks = {"importance": (importance, np.nan), "positions": (positions, position)}
    for of, (array, mark) in marks.items():
        expected[of], tolerance[of] = array.astype(np.float64), 0.0
        np.put_along_axis(expected[of], at, mark, axis=2)
    if counted:
        sums, norms = statistics_of(live[0])
        tensors |= {
            "key_sum": mx.array(sums.astype(np.float32)),
            "inverse_norms": mx.array(norms.astype(np.float32)),
        }
        expected |= {"key_sum_error": np.zeros_like(sums), "norm_error": np.zeros_like(norms)}
        size = float(np.abs(sums).max()) + 2
        tolerance |= {"key_sum_error": 4 * reference.ULP["float32"] * size,
                      "norm_error": 4 * reference.ULP["float32"]}  # fmt: skip
    fields = _fields(name, "replacement", packing, position=position, **zones)
    return drawn_case(fields, tensors, expected, tolerance)


def statistics_of(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum of the normalised keys of each head, and the reciprocal norm of each key."""
    norms = 1 / np.sqrt((keys**2).sum(-1))
    return (keys * norms[..., None]).sum(2), norms
