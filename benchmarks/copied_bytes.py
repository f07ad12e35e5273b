"""Bytes of the cache that move to other memory in mlx_lm's own asynchronous loop.

    python benchmarks/copied_bytes.py --json benchmarks/results/copied_bytes.json

generate_step computes token n + 1 while token n is looked at, and MLX decides whether a buffer is
written in place or copied when it schedules an operation, so asking for an address in the usual
way, which waits, would change what is asked about. `_core.buffer_address` reads the address of a
buffer that is being computed, and neither waits nor holds it. After every token each stored array
of every layer is looked at: at the address of the token before it was written in place, at another
one all of it was copied, and its bytes count. An array that is copied twice within one token, back
to where it was, would be missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import benchmark_models as models
import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache

import mlx_h2o
from mlx_h2o.demo import report
from mlx_h2o.operations import native

HELD_STEPS = 10
PHASES = ("filling", "at the budget")
PARTS = ("words", "scales", "biases")


@dataclass(frozen=True)
class Arm:
    """A kind of cache, and how it is used."""

    name: str
    policy: str | None = None  # of ours; None: mlx_lm's own
    backend: str | None = None
    wait: bool = False  # for every token, so that nothing is under way
    hold: bool = False  # the keys, over HELD_STEPS tokens at the budget
    bits: int | None = None  # of packed rows

    def caches(self, model: Any, budget: int) -> list[Any]:
        if self.policy is not None:
            return mlx_h2o.make_prompt_cache(
                model, budget, policy=self.policy, kv_bits=self.bits, kv_group_size=32
            )
        full = self.name == "KVCache"
        return [KVCache() if full else RotatingKVCache(budget, keep=4) for _ in model.layers]

    @contextlib.contextmanager
    def context(self, model: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.backend is not None:
                stack.enter_context(mlx_h2o.use_backend(self.backend))
            if self.policy is not None:
                stack.enter_context(mlx_h2o.routing(model))
            yield


ARMS = (
    Arm("h2o, native", "h2o-ema", "native"),
    Arm("h2o, native, keys held", "h2o-ema", "native", hold=True),
    Arm("h2o, native, waiting", "h2o-ema", "native", wait=True),
    Arm("window, native", "window", "native"),
    Arm("keydiff, native", "keydiff", "native"),
    Arm("h2o, 8 bits, native", "h2o-ema", "native", bits=8),
    Arm("keydiff, 4 bits, native", "keydiff", "native", bits=4),
    Arm("h2o, composed", "h2o-ema", "composed"),
    Arm("RotatingKVCache"),
    Arm("KVCache"),
)


def stored_arrays(cache: Any) -> dict[str, mx.array]:
    """The arrays that a cache stores, themselves: a view would be another array.

    But for positions: those of the newest rows follow from the offset and are not stored, and all
    are written anew when rows go, 4 bytes per row and head.
    """
    if not hasattr(cache, "_table"):
        return {name: getattr(cache, name) for name in ("keys", "values")}
    table = cache._table
    if table is None:
        return {}
    found: dict[str, mx.array] = dict(table.beside)
    for name in ("keys", "values"):
        parts = getattr(table.tail, name).parts
        names = [name] if len(parts) == 1 else [f"{name}, {part}" for part in PARTS]
        found |= zip(names, parts, strict=True)
    return found


def _parts(rows: Any) -> list[mx.array]:
    return list(rows) if isinstance(rows, tuple) else [rows]


@dataclass
class Watch:
    """The addresses of caches' arrays, token by token."""

    caches: list[Any]
    addresses: dict[tuple[int, str], int] = field(default_factory=dict)
    moved: Counter[str] = field(default_factory=Counter)
    moved_bytes: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    not_under_way: int = 0

    def look(self) -> None:
        """Count the arrays that are elsewhere than at the last look; the first only notes."""
        from mlx_h2o import _core

        self.looks += bool(self.addresses)
        for layer, cache in enumerate(self.caches):
            for name, array in stored_arrays(cache).items():
                address = _core.buffer_address(array)
                before = self.addresses.get((layer, name), address)
                if address == 0:
                    self.not_under_way += 1
                    continue
                if address != before:
                    self.moved[name] += 1
                    self.moved_bytes[name] += array.nbytes
                self.addresses[layer, name] = address

    def start_anew(self) -> None:
        """Forget the counts, not the addresses."""
        self.moved, self.moved_bytes = Counter(), Counter()
        self.looks = self.not_under_way = 0

    def summary(self) -> dict[str, Any]:
        stored = sum(a.nbytes for cache in self.caches for a in stored_arrays(cache).values())
        total = sum(self.moved_bytes.values())
        return {
            "tokens": self.looks,
            "stored_bytes": stored,
            "copied_bytes": total,
            "copied_bytes_per_token": round(total / self.looks, 1) if self.looks else None,
            "copies_of_an_array": dict(self.moved),
            "not_under_way": self.not_under_way,
        }


def measure(arm: Arm, model: Any, budget: int, tokens: int) -> dict[str, Any]:
    """Fill the cache token by token over its last rows, then decode ``tokens`` at the budget."""
    caches = arm.caches(model, budget)
    rows = min(32, budget // 2)  # left for the first phase
    prompt = (mx.arange(budget - rows) * 7919) % model.args.vocab_size
    watch, found = Watch(caches), {}
    held: list[mx.array] = []
    expected: list[np.ndarray] = []
    unchanged = True
    with arm.context(model):
        steps = generate_step(prompt, model, max_tokens=-1, prompt_cache=caches)
        while caches[0].offset < budget:
            next(steps)
            if arm.wait:
                mx.synchronize()
            watch.look()
        found[PHASES[0]] = watch.summary()
        watch.start_anew()
        for token in range(tokens):
            if arm.hold and token == 2:
                held = [part for cache in caches for part in _parts(cache.keys)]
                expected = [np.array(array) for array in held]
            next(steps)
            if arm.wait:
                mx.synchronize()
            watch.look()
            if held and token == 1 + HELD_STEPS:
                unchanged = all(map(np.array_equal, held, expected))
                held = []
        found[PHASES[1]] = watch.summary()
        steps.close()
    if arm.hold:
        found["held_keys_unchanged"] = unchanged
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=list(models.MODELS))
    parser.add_argument("--max-kv-size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32, help="at the budget")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    if reason := native.unavailable_reason():
        parser.error(f"addresses are read by the native back end, which is unavailable: {reason}")
    if arguments.tokens < HELD_STEPS + 2:
        parser.error(f"expected at least {HELD_STEPS + 2} tokens, found {arguments.tokens}")
    result: dict[str, Any] = {"environment": report.environment(), "runs": []}
    for name in arguments.models:
        model = models.MODELS[name]()
        parameters = models.parameters(model)
        print(f"{name}: {parameters:,} parameters, {arguments.max_kv_size} rows")
        arms = {}
        for arm in ARMS:
            arms[arm.name] = found = measure(arm, model, arguments.max_kv_size, arguments.tokens)
            each = (
                f"{phase} {found[phase]['copied_bytes_per_token']:,.0f} bytes per token, of "
                f"{found[phase]['stored_bytes']:,}"
                for phase in PHASES
            )
            print(f"  {arm.name:24} {'; '.join(each)}")
        result["runs"].append(
            {
                "model": name,
                "parameters": parameters,
                "max_kv_size": arguments.max_kv_size,
                "arms": arms,
            }
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
