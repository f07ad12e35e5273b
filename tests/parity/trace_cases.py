"""Many decode steps by the operations themselves: attend, take in the scores, replace a row.

The rows lie on the grid of their packing, so that they are packed exactly by every machine's rule
and all legs follow one float64 run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

import reference
from golden.build import DTYPES, GRID_GROUP, Case, generator, on_grid
from parity.row_cases import drawn_case

ROWS, STEPS, SINKS, RECENT, DECAY, WIDTH = 33, 24, 2, 8, 0.9, 64


class _TooCloseError(Exception):
    """Two rows that might go first are too near each other for float32 to tell apart."""


def trace_cases(seed: int) -> Iterator[Case]:
    """Dense and packed rows, with key statistics."""
    for index, bits in enumerate((None, (8, 8), (4, 8))):
        dtype = ("f32", "f16", "bf16")[index]
        name = f"steps-{'dense' if bits is None else f'{bits[0]}.{bits[1]}'}-{dtype}"
        for attempt in itertools.count():
            try:
                yield _steps_case(name, generator(f"{name}-{attempt}", seed), bits, dtype)
                break
            except _TooCloseError:
                continue


def _steps_case(name: str, rng: np.random.Generator, bits: Any, dtype: str) -> Case:
    kind = DTYPES[dtype]
    total = ROWS + STEPS
    rows = {
        side: mx.array(on_grid(rng, b, (1, 2, total, WIDTH)).astype(np.float32)).astype(kind)
        for side, b in zip(("keys", "values"), bits or (8, 8), strict=True)
    }
    queries = rng.standard_normal((1, 4, STEPS, WIDTH)).astype(np.float32)
    tensors = rows | {"queries": mx.array(queries).astype(kind)}
    importance = rng.random((1, 2, ROWS)).astype(np.float32) * 3
    positions = np.stack([rng.permutation(ROWS) for _ in range(2)])[None].astype(np.int32)
    tensors |= {"importance": mx.array(importance), "positions": mx.array(positions)}
    scale = float(np.float32(WIDTH**-0.5))
    expected, allowed = _followed(tensors, scale)
    fields = {
        "name": name, "op": "steps", "bits": bits, "group_size": GRID_GROUP, "scale": scale,
        "decay": DECAY, "sink_size": SINKS, "recent_size": RECENT, "slack": 0,
        "sparse_v_threshold": 0.0,
    }  # fmt: skip
    return drawn_case(fields, tensors, expected, allowed)


def _followed(
    tensors: dict[str, mx.array], scale: float
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Every step in float64: what comes out, and how far it may be off."""
    wide = {name: reference.float64(array) for name, array in tensors.items()}
    keys, values = (wide[side][:, :, :ROWS].copy() for side in ("keys", "values"))
    importance = wide["importance"].copy()
    positions = np.array(tensors["positions"]).copy()
    outs, places, allowed = [], [], {"out": 0.0, "importance": 0.0}
    for step in range(STEPS):
        position = ROWS + step
        for head, slot in enumerate(_worst(importance, positions, position)):
            keys[0, head, slot] = wide["keys"][0, head, position]
            values[0, head, slot] = wide["values"][0, head, position]
            importance[0, head, slot], positions[0, head, slot] = np.nan, position
        q = tensors["queries"][:, :, step : step + 1]
        found = reference.attention(q, keys, values, scale=scale)
        importance = reference.accumulate(importance, found.scores, decay=DECAY)
        narrow = [mx.array(a.astype(np.float32)).astype(q.dtype) for a in (keys, values)]
        bounds = reference.tolerances(q, *narrow, scale=scale, expected=found)
        allowed["out"] = max(allowed["out"], bounds.out)
        allowed["importance"] = max(allowed["importance"], 2 * bounds.scores)
        outs.append(found.out)
        places.append(positions.copy())
    expected = {
        "out": np.concatenate(outs, axis=2),
        "positions": np.stack(places),
        "importance": importance,
    }
    return expected, allowed | {"positions": 0.0}


def _worst(importance: np.ndarray, positions: np.ndarray, position: int) -> list[int]:
    zones = {"sink_size": SINKS, "recent_start": position + 1 - RECENT}
    two = reference.evict_indices(importance, positions, count=2, **zones)[0]
    for head, pair in enumerate(two):
        first, second = importance[0, head, pair.astype(int)]
        if abs(first - second) < 1e-3:
            raise _TooCloseError
    return [int(pair[0]) for pair in two]
