"""Cache traces of every policy, as a routed model sees them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cache_columns import EVICTING
from golden.build import DTYPES, Case, trace_case


def policy_cases(seed: int) -> Iterator[Case]:
    """Dense rows, each head by itself or all alike, and packed ones, in groups of every kind;
    chunks, then single tokens.

    Not of policies that merge: Python alone has them.
    """
    dtypes = itertools.cycle(DTYPES)
    for policy, dtype in zip(EVICTING, dtypes, strict=False):
        for kind, every in (("", 16), ("-shared", 5), ("-8.4", 1)):
            yield trace_case(
                f"trace-{seed}-routed-{policy}{kind}",
                policy=policy,
                routed=True,
                shared_heads=kind == "-shared",
                evict_every=every,
                zones=(2, 16, 14),
                prefill=(40, 5, 9),
                steps=80,
                dtype=dtype,
                bits=(8, 4) if kind == "-8.4" else None,
                seed=seed,
            )
