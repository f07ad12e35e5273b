"""Traces of 1,000 steps with every policy, for languages that use the same back end.

They keep the same rows at every step. Legs of other back ends would diverge at close choices.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import mlx_h2o
from cache_columns import EVICTING, FOLDING
from golden.build import Case, trace_case
from mlx_h2o.operations.backends import use_backend
from parity import traces

BACKEND, STEPS = "native", 1000
_routed = partial(trace_case, zones=(2, 12, 10), dtype="f32", routed=True)
KINDS = {"dense": None, "8.4": (8, 4)}

# Files that cases load; they go when Python ends.
_folder = tempfile.TemporaryDirectory(prefix="mlx-h2o-parity-")


def long_cases(seed: int) -> Iterator[Case]:
    """Dense and packed rows; and of each policy one cache that goes on from Python's file."""
    for index, policy in enumerate((*EVICTING, *FOLDING)):
        for place, (kind, bits) in enumerate(KINDS.items()):
            for loaded in (False, True) if place == index % 2 else (False,):
                name = f"long-{policy}-{kind}{'-loaded' if loaded else ''}"
                given = {"policy": policy, "bits": bits, "steps": STEPS, "seed": seed}
                case = _routed(name, prefill=() if loaded else (40,), **given)
                if loaded:
                    case.fields["load"] = str(_written(policy, bits, seed))
                case.fields["only"] = BACKEND
                yield case


def _written(policy: str, bits: tuple[int, int] | None, seed: int) -> Path:
    """A file of a cache that has read a prompt and decoded a little."""
    name = f"{policy}-{'dense' if bits is None else 'packed'}-{seed}"
    case = _routed(name, policy=policy, steps=20, bits=bits)
    with use_backend(BACKEND):
        cache, _ = traces.followed(case, mlx_h2o.operations.backends.get(BACKEND))
    path = Path(_folder.name) / f"{name}.safetensors"
    mlx_h2o.save_prompt_cache(path, [cache])
    return path
