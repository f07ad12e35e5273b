"""Cache traces of every policy that all languages have, as in a routed model."""

import itertools
from collections.abc import Iterator
from typing import Any

from cache_columns import FOLDING
from golden.build import DTYPES, Case, trace_case
from parity.trace_reference import follow

# The policies that evict, in every language.
EVICTING = ("h2o-ema", "window", "keydiff")


def policy_cases(seed: int) -> Iterator[Case]:
    """Dense rows and packed ones, in groups of every kind; chunks, then single tokens.

    Rows that are folded are float32, and fewer: a mean of narrower ones is rounded, and what is
    made of that in turn.
    """
    dtypes = itertools.cycle(DTYPES)
    for policy, dtype in zip(EVICTING, dtypes, strict=False):
        for kind, every in (("", 16), ("-8.4", 1)):
            yield _routed(policy, kind, every, seed, steps=80, dtype=dtype)
    yield _routed("keydiff", "-context", 4, seed, steps=80, dtype="f32")
    for policy in FOLDING:
        for kind, every in (("", 1), ("", 7), ("-8.4", 4), ("-context", 4), ("-long", 4)):
            yield _sure(policy, kind, every, seed)
        for kind, dtype in (("", "f16"), ("-8.4", "f32")):
            given = {"steps": 80, "dtype": dtype, "fold": False}
            yield _routed(policy, kind, 3, seed, f"{kind}-dropped", **given)


def _sure(policy: str, kind: str, every: int, seed: int) -> Case:
    """A trace in which no choice is close, so that every leg has to make the same."""
    for attempt in itertools.count():
        name = f"{kind}-every-{every}"
        case = _routed(policy, kind, every, seed + 1000 * attempt, name, steps=30, dtype="f32")
        if not follow(case)[1]:
            return case
    raise AssertionError("unreachable")


def _routed(policy: str, kind: str, every: int, seed: int, name: str = "", **given: Any) -> Case:
    return trace_case(
        f"trace-{seed}-routed-{policy}{name or kind}", policy=policy, zones=(2, 16, 14), seed=seed,
        prefill=(1100 if kind == "-long" else 40, 5, 9), bits=(8, 4) if kind == "-8.4" else None,
        evict_every=every, context_size=40 if kind == "-context" else None, routed=True, **given,
    )  # fmt: skip
