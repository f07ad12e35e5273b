"""Cases of a decode step: attention whose scores or weights are accumulated in C."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

import reference
from golden.build import DTYPES, Case, generator, row_bias
from parity.calls import Call, drawn_case

# Bits of keys and of values, and the group; None: dense.
PACKINGS = ((None, 64), ((8, 8), 64), ((4, 8), 32), ((8, 4), 64))
DECAY = 0.9


def step_cases(seed: int) -> Iterator[Case]:
    """Every packing with one query and several, in one pass and in two."""
    case = partial(attend_case, seed=seed)
    for kind, (index, (packing, rows)) in itertools.product(
        ("ema", "mass"), enumerate(itertools.product(PACKINGS, (37, 1030)))
    ):
        dtype, mass = [*DTYPES][index % 3], kind == "mass"
        biased = index % 4 in ((0, 3) if mass else (1, 2))
        sparse = 1e-3 if mass and packing[0] and rows == 1030 else 0.0
        yield case(
            f"attend{'-mass' * mass}-{_of(packing)}-{rows}{'-bias' * biased}-{dtype}", packing,
            rows=rows, queries=1 + (4 if mass else 2) * (index % 2), kind=kind, sparse=sparse,
            mask="causal" if index % 4 else "", sinks=dtype if index % 3 else "", bias=biased,
            dtype=dtype,
        )  # fmt: skip
    for packing in PACKINGS[:2]:
        bias, rows = partial(row_bias, nan=True), {"rows": 40, "queries": 3}
        yield case(f"attend-{_of(packing)}-bias-nan", packing, **rows, mask="causal", bias=bias)
        yield case(f"attend-{_of(packing)}-masked", packing, **rows, mask="bool")
        yield case(f"attend-mass-{_of(packing)}-not-finite", packing, **rows, kind="mass",
                   mask="bool", bias=bias, sinks=[np.inf, -np.inf, 0.0, 0.0])  # fmt: skip
    for packing in PACKINGS[1:]:
        yield case(f"attend-{_of(packing)}-sparse", packing, rows=300, sparse=1e-3)


def _of(packing: Any) -> str:
    bits, group = packing
    return "dense" if bits is None else f"{bits[0]}.{bits[1]}-g{group}"


def attend_case(name: str, packing: Any, *, kind: str = "ema", seed: int = 0, **given: Any) -> Case:
    """Attention that takes its scores, or its weights, into C."""
    bits, group = packing
    call = Call(bits=bits, group=group, batch=2, heads=(4, 2), sizes=(64, 128), **given)
    rng = generator(name, seed)
    fields, tensors, live, arguments = call.made(rng)
    before = rng.random((2, 2, call.rows)).astype(np.float32) * 3
    before[rng.random(before.shape) < 0.2] = np.nan
    q, narrow = (
        tensors["queries"],
        [mx.array(reference.float64(a).astype(np.float32)) for a in live],
    )
    exact = reference.attention(q, *live, **arguments)
    if kind == "ema":
        importance = reference.accumulate(before, exact.scores, decay=DECAY)
    else:
        mass = reference.attention_mass(exact.scores, exact.lse, 2)
        importance = np.nan_to_num(before.astype(np.float64)) + mass
    allowed = reference.tolerances(q, *narrow, **arguments, expected=exact)
    size, out, of_out = float(np.nanmax(np.abs(importance))), exact.out, allowed.out
    if call.sparse:
        out = reference.attention(q, *live, **arguments, sparse_v_threshold=call.sparse).out
        # A kernel of one pass compares with what it has seen so far, and so drops less.
        of_out += reference.dropped_mass(exact, call.sparse) * float(mx.abs(narrow[1]).max())
    of_importance = allowed.scores + reference.tolerance(0.0, size, "float32")
    return drawn_case(
        fields | {"name": name, "op": "attend", "decay": DECAY, "kind": kind},
        tensors | {"importance": mx.array(before)},
        {"out": out, "importance": importance},
        {"out": of_out, "importance": of_importance},
    )
