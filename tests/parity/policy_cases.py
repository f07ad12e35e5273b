"""Cache traces of every policy, as a routed model sees them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from golden.build import DTYPES, Case, trace_case
from mlx_h2o import policies


def policy_cases(seed: int) -> Iterator[Case]:
    """Dense rows and packed ones, a chunk of every kind, then single tokens."""
    dtypes = itertools.cycle(DTYPES)
    for policy, dtype in zip(policies.names(), dtypes, strict=False):
        for bits in (None, (8, 4)):
            packing = "" if bits is None else f"-{bits[0]}.{bits[1]}"
            yield trace_case(
                f"trace-{seed}-routed-{policy}{packing}",
                policy=policy,
                routed=True,
                zones=(2, 16, 14),
                prefill=(40, 5, 9),
                steps=80,
                dtype=dtype,
                bits=bits,
                seed=seed,
            )
