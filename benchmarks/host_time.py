"""Python time of one decoding step of one layer, beside RotatingKVCache's in the same process.

    python benchmarks/host_time.py --label after --json benchmarks/results/host_time.json

A step is ``update_and_fetch`` and attention as a routed model calls it, at a full budget, with one
token. It only builds the graph; evaluation happens between turns and is not counted. The arms take
turns in rotating order, and a ratio compares a turn with RotatingKVCache's turn in the same round,
which uses mlx_lm's own attention.

The GPU path runs without a GPU: a stand-in replaces every Metal kernel and makes arrays of the same
shapes, so the times lack only the few microseconds that MLX itself takes for a kernel. "Ragged"
arms are batches of eight sequences of different lengths, with the mask of the step, compared with
mlx_lm's BatchKVCache in the same round.

"Calls" are the operations of mlx.core in a step, counted separately.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import ModuleType
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx_lm.models.base as base
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

import mlx_h2o
from lib import common
from mlx_h2o import H2OConfig, H2OKVCache, HeadGroups
from mlx_h2o.evaluation.statistics import in_turns, ratios, spread
from mlx_h2o.lm import routing
from mlx_h2o.operations import backends
from mlx_h2o.operations.gpu import metal

ROWS, HEADS, KV_HEADS, SIZE = 256, 8, 4, 64
SHAPE = {"rows": ROWS, "heads": [HEADS, KV_HEADS], "size": SIZE}
ROTATING, STOCK, BATCH = "rotating", "mlx_lm 8 bits", "ragged mlx_lm"
ARMS: dict[str, dict[str, Any]] = {
    **{policy: {"policy": policy} for policy in ("keydiff", "h2o-ema", "window", "snapkv", "h2o")},
    **{f"8 bits {p}": {"policy": p, "kv_bits": 8} for p in ("keydiff", "h2o-ema", "window", "h2o")},
    **{
        f"mixed {policy}": {"policy": policy, "kv_bits": 8, "light_bits": 4}
        for policy in ("keydiff", "h2o-ema")
    },
    # One of four KV heads has more rows than the others.
    **{f"groups {policy}": {"policy": policy} for policy in ("keydiff", "h2o")},
    "groups 8 bits keydiff": {"policy": "keydiff", "kv_bits": 8},
    **{f"ragged {policy}": {"policy": policy} for policy in ("keydiff", "h2o")},
}
_stock: Callable[..., mx.array] = base.scaled_dot_product_attention
_routed = routing._routed(_stock)


class Arm:
    """A full cache, and attention over it."""

    def __init__(self, name: str, steps: int) -> None:
        self.masked = name.startswith("ragged")
        self.attend = _routed if name in ARMS else _stock
        if name == ROTATING:
            self.cache: Any = RotatingKVCache(ROWS, keep=4)
        elif name == STOCK:
            self.cache = QuantizedKVCache(group_size=64, bits=8)
        elif self.masked:
            # Caches start with 8 to 64 rows and never reach their budget.
            config = name in ARMS and H2OConfig.of(max_kv_size=steps + 400, **ARMS[name])
            self.cache = _grown([H2OKVCache(config) if config else KVCache() for _ in range(8)])
        else:
            config = H2OConfig.of(max_kv_size=ROWS, **ARMS[name])
            rows = [ROWS] * KV_HEADS
            if name.startswith("groups"):
                rows[1] *= 2
            self.cache = HeadGroups.of_rows([config.scaled(one) for one in rows])
        shapes, count = (HEADS, KV_HEADS, KV_HEADS), 8 if self.masked else 1
        self.rows = [mx.random.normal((count, heads, 1, SIZE)) for heads in shapes]
        mx.eval(self.rows)
        for _ in range(8 if self.masked else 2 * ROWS + 40):
            mx.eval(self.step())

    def step(self) -> mx.array:
        queries, keys, values = self.rows
        mask = self.cache.make_mask(1) if self.masked else None
        found = self.cache.update_and_fetch(keys, values)
        return self.attend(queries, *found, self.cache, scale=SIZE**-0.5, mask=mask)

    def turn(self, steps: int) -> float:
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        for _ in range(steps):
            out = self.step()
        seconds = (time.perf_counter() - start) / steps
        gc.enable()
        mx.eval(out)
        return seconds

    def calls(self, steps: int) -> float:
        """Operations of mlx.core and of our extension in a step."""
        count = 0

        def counted(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                return function(*args, **kwargs)

            return call

        modules: list[ModuleType] = [mx, mx.fast]
        with contextlib.suppress(ImportError):
            from mlx_h2o import _core

            modules.append(_core)
        with contextlib.ExitStack() as stack:
            for module in modules:
                for name, value in vars(module).items():
                    if type(value).__name__ in ("nb_func", "builtin_function_or_method"):
                        stack.enter_context(mock.patch.object(module, name, counted(value)))
            for name in ("__getitem__", "__setitem__"):
                original = getattr(mx.array, name)
                with contextlib.suppress(TypeError):
                    stack.enter_context(mock.patch.object(mx.array, name, counted(original)))
            # Resolved back ends hold functions of the extension, which are to be counted too.
            backends.forget()
            stack.callback(backends.forget)
            for _ in range(steps):
                out = self.step()
        mx.eval(out)
        return count / steps


def _grown(caches: list[Any]) -> Any:
    """A batch of these caches, with 8, 16, ... rows."""
    for count, cache in enumerate(caches, 1):
        queries, rows = (mx.zeros((1, heads, 8 * count, SIZE)) for heads in (HEADS, KV_HEADS))
        found = cache.update_and_fetch(rows, rows)
        mx.eval(_routed(queries, *found, cache, scale=SIZE**-0.5, mask="causal"))
    return type(caches[0]).merge(caches)


def _stand_in(**kernel: Any) -> Callable[..., list[mx.array]]:
    """Replaces ``mx.fast.metal_kernel``: one operation, whose outputs have the right shapes and
    depend on the inputs."""

    made = lru_cache(mx.zeros)

    def run(**call: Any) -> list[mx.array]:
        outputs = [*map(made, call["output_shapes"], call["output_dtypes"])]
        found: list[mx.array] = mx.depends(outputs, call["inputs"])
        return found

    return run


@contextlib.contextmanager
def gpu_without_one() -> Iterator[None]:
    """Select the back end "metal", with stand-ins for its kernels."""
    with (
        mock.patch.object(mx.fast, "metal_kernel", _stand_in),
        mock.patch.multiple(metal.BACKEND, unavailable_reason=str, serves=lambda: True),
        mlx_h2o.use_backend("metal"),
    ):
        yield


def measure(backend: str, rounds: int, steps: int) -> dict[str, Any]:
    named = gpu_without_one() if backend == "metal" else mlx_h2o.use_backend(backend)
    with named:
        arms = {name: Arm(name, rounds * steps) for name in (ROTATING, STOCK, BATCH, *ARMS)}
        turns = in_turns({name: partial(arm.turn, steps) for name, arm in arms.items()}, rounds)
        found = {}
        for name, arm in arms.items():
            beside, ratio = (BATCH, "batch") if arm.masked else (ROTATING, "rotating")
            found[name] = {
                "microseconds": spread([1e6 * seconds for seconds in turns[name]], 2),
                f"times_{ratio}": ratios(turns[name], turns[beside], 2),
                "calls": round(arm.calls(64), 1),
            }
            common.show(f"{backend}, {name}", found[name])
    return found


def main() -> None:
    args = common.arguments(
        __doc__, backends=("native", "composed", "metal"), rounds=25, steps=64, label="after"
    )
    found = {}
    for backend in args.backends:
        if backend != "metal" and (reason := backends.backends()[backend].reason):
            print(f"{backend}: left out, {reason}")
            continue
        found[backend] = measure(backend, args.rounds, args.steps)
    given = {"rounds": args.rounds, "steps_per_turn": args.steps}
    before = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    run = common.described({**SHAPE, **given, "backends": found})
    common.write(args.json, before | {args.label: run})


if __name__ == "__main__":
    main()
