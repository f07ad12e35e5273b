"""Cases of a decode step: attention whose scores go into the moving average."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

import reference
from golden.build import DTYPES, Case, generator, row_bias
from parity.row_cases import drawn_case

# Bits of keys and of values, and the group; None: dense.
PACKINGS = (None, ((8, 8), 64), ((4, 8), 32), ((8, 4), 64))


def step_cases(seed: int) -> Iterator[Case]:
    """Every packing with one query and several, in one pass and in two."""
    for index, (packing, rows) in enumerate(itertools.product(PACKINGS, (37, 1030))):
        dtype = [*DTYPES][index % 3]
        biased = index % 4 in (1, 2)
        name = f"attend-{_of(packing)}-{rows}{'-bias' * biased}-{dtype}"
        yield attend_case(
            name, packing=packing, rows=rows,
            queries=1 + 2 * (index % 2), mask="causal" if index % 4 else "",
            sinks=bool(index % 3), bias=row_bias if biased else None, dtype=dtype,
            seed=seed,
        )  # fmt: skip
    for packing in PACKINGS[:2]:
        yield attend_case(
            f"attend-{_of(packing)}-bias-nan", packing=packing, rows=40, queries=3, mask="causal",
            sinks=False, bias=partial(row_bias, nan=True), dtype="f32", seed=seed,
        )  # fmt: skip
    for packing in PACKINGS[1:]:
        yield attend_case(
            f"attend-{_of(packing)}-sparse", packing=packing, rows=300, queries=1, mask="",
            sinks=False, dtype="f32", threshold=1e-3, seed=seed,
        )  # fmt: skip
    for index, (packing, rows) in enumerate(itertools.product(PACKINGS, (37, 1030))):
        dtype = [*DTYPES][index % 3]
        biased = index % 4 in (0, 3)
        yield attend_case(
            f"attend-mass-{_of(packing)}-{rows}{'-bias' * biased}-{dtype}", packing=packing,
            rows=rows, queries=1 + 4 * (index % 2), mask="causal" if index % 4 else "",
            sinks=bool(index % 3), bias=row_bias if biased else None, dtype=dtype, kind="mass",
            threshold=1e-3 if packing and rows == 1030 else 0.0, seed=seed,
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
    sinks: bool,
    dtype: str,
    bias: Any = None,
    threshold: float = 0.0,
    kind: str = "ema",
    seed: int,
) -> Case:
    """Attention that takes its scores, or its weights, into C."""
    scale, decay = float(np.float32(64**-0.5)), 0.9
    rng = generator(name, seed)
    tensors, live = _stored(rng, packing, (2, 2, rows), DTYPES[dtype])
    q = rng.standard_normal((2, 4, queries, 64)).astype(np.float32)
    tensors["queries"] = mx.array(q).astype(DTYPES[dtype])
    arguments: dict[str, Any] = {"scale": scale, "mask": mask or None, "sinks": None}
    if sinks:
        drawn = rng.standard_normal(4).astype(np.float32)
        arguments["sinks"] = tensors["sinks"] = mx.array(drawn).astype(DTYPES[dtype])
    if bias is not None:
        arguments["row_bias"] = tensors["row_bias"] = bias(rng, (2, 2, rows))
    before = rng.random((2, 2, rows)).astype(np.float32) * 3
    before[rng.random(before.shape) < 0.2] = np.nan
    exact = reference.attention(tensors["queries"], *live, **arguments)
    if kind == "ema":
        importance = reference.accumulate(before, exact.scores, decay=decay)
    else:
        mass = reference.attention_mass(exact.scores, exact.lse, 2)
        importance = np.nan_to_num(before.astype(np.float64)) + mass
    narrow = [mx.array(a.astype(np.float32)) for a in live]
    allowed = reference.tolerances(tensors["queries"], *narrow, **arguments, expected=exact)
    size = float(np.nanmax(np.abs(importance)))
    out, of_out = exact.out, allowed.out
    if threshold:
        out = reference.attention(
            tensors["queries"], *live, **arguments, sparse_v_threshold=threshold
        ).out
        # A kernel of one pass compares with what it has seen so far, and so drops less.
        of_out += reference.dropped_mass(exact, threshold) * float(np.abs(live[1]).max())
    tensors |= {"importance": mx.array(before)}
    expected = {"out": out, "importance": importance}
    tolerance = {
        "out": of_out,
        "importance": allowed.scores + reference.tolerance(0.0, size, "float32"),
    }
    fields = _fields(name, "attend", packing, scale=scale, mask=mask, decay=decay, kind=kind)
    fields["sparse_v_threshold"] = threshold
    return drawn_case(fields, tensors, expected, tolerance)
