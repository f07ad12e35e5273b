"""Measure speed and memory of a model with our caches, relative to mlx_lm's; values that sparse V
skips; and caches that fill row by row."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..caches.cache import PROMPT_CHUNK, H2OKVCache
from ..config import H2OConfig
from ..evaluation.arms import REFUSALS, with_growing
from ..evaluation.speed import Make, timed
from ..evaluation.statistics import in_turns, ratios
from ..fast import scaled_dot_product_attention_quantized_with_scores as quantized_attention
from ..lm.generation_checks import vocabulary
from ..lm.prompt_cache import make_prompt_cache
from ..operations.backends import resolve

STOCK = "mlx_lm"
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, 6 and 5 bits": {"kv_bits": 6, "v_bits": 5, "policy": "h2o"},
    "ours, turbo3": {"kv_format": "turbo3", "policy": "h2o"},
}
"""Settings of our caches, which keep a quarter of the rows."""
_HEADS, _SIZE, _THRESHOLD, _CALLS = 8, 128, 1e-6, 20


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def measure(model: Any, lengths: Sequence[int], repeats: int, tokens: int) -> dict[str, Any]:
    """Tokens a second, bytes, and ratios to mlx_lm's turns, for each length and arm.

    Args:
        model: an mlx_lm model.
        lengths: tokens of prompts, which are random.
        repeats: turns of decoding, and the least number of prompt chunks.
        tokens: tokens to write in a turn.
    """
    mx.eval(model.parameters())
    found: dict[str, Any] = {"weights": mx.get_active_memory(), "lengths": {}}
    for length in (min(lengths), *lengths):  # the first warms up
        say(f"{length} tokens")
        found["lengths"][str(length)] = arms = _of_length(model, length, repeats, tokens)
        for name, arm in arms.items():  # in case the run does not finish
            say(f"{name}: {arm['prefill']:,.0f} and {arm['decode']:,.1f} tokens a second")
    return found


def _of_length(model: Any, length: int, repeats: int, tokens: int) -> dict[str, Any]:
    rounds = math.ceil(repeats / math.ceil(length / PROMPT_CHUNK))
    mx.random.seed(0)
    prompt = mx.random.randint(0, vocabulary(model), (length + 1,))
    arms = timed(model, _makes(model, prompt), prompt, rounds=rounds, turns=repeats, tokens=tokens)
    stock = arms[STOCK]
    return {
        name: {
            "prefill": round(length * rounds / sum(arm.prefill), 2),
            "prefill_to_mlx_lm": ratios(stock.prefill, arm.prefill, 3),
            "decode": round(tokens * repeats / sum(arm.decode), 2),
            "decode_to_mlx_lm": ratios(stock.decode, arm.decode, 3),
            "cache": sum(one.nbytes for one in arm.caches),
            "peak": max(arm.peaks.values()),
        }
        for name, arm in arms.items()
    }


def _makes(model: Any, prompt: mx.array) -> dict[str, Make]:
    """The caches that work with this model in a short trial, mlx_lm's first."""
    found: dict[str, Make] = {STOCK: partial(mlx_lm_cache.make_prompt_cache, model)}
    packed = partial(mlx_lm_cache.QuantizedKVCache, 64, 8)
    found["mlx_lm, 8 bits"] = partial(with_growing, model, packed)
    for name, settings in OURS.items():
        found[name] = partial(make_prompt_cache, model, max(16, len(prompt) // 4), **settings)
    for name, make in [*found.items()]:
        try:
            timed(model, {name: make}, prompt[:18], turns=1, tokens=1)
        except REFUSALS as error:
            say(f"not {name}: {error}")
            del found[name]
    return found


def sparse_v(rows: int, repeats: int) -> dict[str, Any]:
    """Attention of a query of 32 heads over rows of 8 bits whose logits lie far apart: the share of
    values that sparse V skips, and the speedup, timed in turns."""
    mx.random.seed(0)
    q = (4 * mx.random.normal((1, 4 * _HEADS, 1, _SIZE))).astype(mx.float16)
    dense = mx.random.normal((2, 1, _HEADS, rows, _SIZE)).astype(mx.float16)
    keys, values = (tuple(mx.quantize(one, bits=8)) for one in dense)
    given: dict[str, Any] = {"scale": _SIZE**-0.5, "bits": 8, "v_bits": 8}

    def seconds(threshold: float) -> float:
        start = time.perf_counter()
        for _ in range(_CALLS):
            found = resolve().attention(q, keys, values, sparse_v_threshold=threshold, **given)
            mx.eval(found[0])
        return time.perf_counter() - start

    arms = {threshold: partial(seconds, threshold) for threshold in (0.0, _THRESHOLD)}
    in_turns(arms, 1)  # compiles
    whole, sparse = in_turns(arms, repeats).values()
    given |= {"sparse_v_threshold": _THRESHOLD, "return_skipped": True}
    *_, skipped = quantized_attention(q, *keys, *values, **given)
    return {"rows": rows, "threshold": _THRESHOLD, "skipped": mx.mean(skipped).item(),
            "speed": ratios(whole, sparse, 3)}  # fmt: skip


def growth(rows: int, repeats: int) -> dict[str, Any]:
    """Unbounded caches: bytes at an eighth, half and all of the rows, the peak, and the time
    relative to mlx_lm's."""

    def ours(**room: Any) -> Callable[[], Any]:
        return lambda: H2OKVCache(H2OConfig.of(max_kv_size=None, policy="window", **room))

    row = mx.random.normal((1, _HEADS, 1, _SIZE)).astype(mx.float16)
    mx.eval(row)

    def filled(make: Callable[[], Any]) -> tuple[float, dict[str, Any]]:
        cache, held, before = make(), {}, mx.get_active_memory()
        mx.reset_peak_memory()
        start = time.perf_counter()
        for count in range(1, rows + 1):
            mx.eval(cache.update_and_fetch(row, row))
            if count in (rows // 8, rows // 2, rows):
                held[str(count)] = cache.nbytes
        seconds = time.perf_counter() - start
        return seconds, {"bytes": held, "peak": mx.get_peak_memory() - before}

    makes = {STOCK: mlx_lm_cache.KVCache, "grows": ours(), "preallocated": ours(preallocate=rows)}
    turns = in_turns({name: partial(filled, make) for name, make in makes.items()}, repeats)
    times = {name: [seconds for seconds, _ in found] for name, found in turns.items()}
    return {
        name: found[-1][1] | {"time_to_mlx_lm": ratios(times[name], times[STOCK], 3)}
        for name, found in turns.items()
    }
