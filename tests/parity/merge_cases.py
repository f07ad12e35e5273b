"""Cases of rows that merge, drawn until no choice is close: then all legs have to make the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import mlx.core as mx
import numpy as np

import reference
import reference_merging
from cache_merged import MADE
from golden.build import DTYPES, Case, generator
from parity.row_cases import drawn_case
from reference_cache import Row


def merge_cases(seed: int) -> Iterator[Case]:
    """Lengths astride vectors of rows, groups of one row and of many, and zones of every kind."""
    for index, rows in enumerate((2, 31, 32, 33, 65)):
        dtype = [*DTYPES][index % 3]
        zones = {"sink_size": 0} if rows == 2 else {}
        yield merge_case(f"merge-rows-{rows}-{dtype}", rows=rows, dtype=dtype, seed=seed, **zones)
    for going in (2, 9):
        yield merge_case(f"merge-{going}-rows", going=going, seed=seed)
    yield merge_case("merge-of-two-clocks", going=4, clocks=(34, 21), seed=seed)
    yield merge_case("merge-shared", going=5, shared=True, seed=seed)
    yield merge_case("merge-some-leave", going=6, leaving=0.1, seed=seed)


def merge_case(
    name: str,
    *,
    rows: int = 40,
    going: int = 1,
    dtype: str = "f32",
    sink_size: int = 2,
    recent_start: int = 28,
    clocks: tuple[int, ...] = (),
    shared: bool = False,
    leaving: float = 0.0,
    seed: int = 0,
) -> Case:
    """``going`` rows of two heads merge; ``clocks``: where the window of each sequence begins;
    ``leaving``: the share of rows without a bias, which go first."""
    fields = {"name": name, "op": "merge", "keep": rows - going, "sink_size": sink_size}
    fields |= {"recent_start": recent_start, "shared": shared}
    shape = (max(1, len(clocks)), 2, rows)
    for attempt in itertools.count():
        rng = generator(f"{name}-{attempt}", seed)
        drawn = {
            "keys": rng.standard_normal((*shape, 32)) * rng.uniform(0.5, 1.5, (*shape, 1)),
            "values": rng.standard_normal((*shape, 24)),
        }
        tensors = {
            part: mx.array(array.astype(np.float32)).astype(DTYPES[dtype])
            for part, array in drawn.items()
        }
        counts = rng.integers(1, 6, shape)
        bias = np.where(rng.random(shape) < leaving, np.nan, np.log(counts))
        tensors["bias"] = mx.array(bias.astype(np.float32))
        heads = shape[0] * (1 if shared else shape[1])
        places = np.stack([rng.permutation(rows) for _ in range(heads)]).reshape(shape[0], -1, rows)
        places = np.broadcast_to(places, shape).astype(np.int32)
        tensors["positions"] = mx.array(places)
        if clocks:
            tensors["recent_start"] = mx.array(clocks, mx.int32)
        expected = _expected(tensors, counts, fields, clocks)
        if expected is not None:
            rounding = 0.0 if dtype == "f32" else reference.ULP[str(DTYPES[dtype])[9:]]
            allowed = dict.fromkeys(("kept", "into", "positions"), 0.0) | {"bias": MADE}
            for part in ("keys", "values"):
                allowed[part] = MADE + rounding * float(np.abs(expected[part]).max())
            return drawn_case(fields, tensors, expected, allowed)
    raise AssertionError("unreachable")


def _expected(tensors, counts, fields, clocks) -> dict[str, np.ndarray] | None:
    """What becomes of the rows, or None where a choice was close."""
    keys, values = (reference.float64(tensors[part]) for part in ("keys", "values"))
    positions, leaves = (np.array(tensors[part]) for part in ("positions", "bias"))
    leaves = np.isnan(leaves)
    counts = np.where(leaves, 1, counts)
    zones = {"sink_size": fields["sink_size"], "prefix_size": 0}
    config = SimpleNamespace(shared_heads=fields["shared"], **zones)
    columns: dict[str, list] = {name: [] for name in ("kept", "into", *tensors)}
    columns.pop("recent_start", None)
    batch, heads, rows = positions.shape
    for b in range(batch):
        stored = [
            [
                Row(int(positions[b, h, n]), keys[b, h, n], values[b, h, n], slot=n,
                    count=int(counts[b, h, n]), leaves=bool(leaves[b, h, n]))
                for n in range(rows)
            ]
            for h in range(heads)
        ]  # fmt: skip
        start = clocks[b] if clocks else fields["recent_start"]
        targets, close = reference_merging.mergers(
            config, stored, rows - fields["keep"], start, lambda *row: row
        )
        if close:
            return None
        for found, into in zip(stored, targets, strict=True):
            slots = [into[slot] for slot in sorted(into)]
            columns["kept"].append([slot for slot in range(rows) if slot not in into])
            columns["into"].append(slots)
            columns["keys"].append([found[slot].key for slot in slots])
            columns["values"].append([found[slot].value for slot in slots])
            columns["bias"].append([np.log(found[slot].count) for slot in slots])
            columns["positions"].append([found[slot].position for slot in slots])
    arrays = {name: np.array(column) for name, column in columns.items()}
    return {name: array.reshape(batch, heads, *array.shape[1:]) for name, array in arrays.items()}
