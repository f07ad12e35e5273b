"""Speed and memory of a model with our caches, as multiples of those with mlx_lm's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..caches.cache import PROMPT_CHUNK
from ..evaluation.speed import Make, timed
from ..evaluation.statistics import ratios
from ..lm.generation_checks import vocabulary
from ..lm.prompt_cache import make_prompt_cache

STOCK = "mlx_lm"
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, 6 and 5 bits": {"kv_bits": 6, "v_bits": 5, "policy": "h2o"},
    "ours, turbo3": {"kv_format": "turbo3", "policy": "h2o"},
}
"""Settings of our caches, which keep a quarter of the rows."""


def measure(
    model: Any, lengths: Sequence[int], repeats: int, tokens: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Tokens a second, bytes and ratios to mlx_lm's turns, of each length and arm.

    Args:
        model: an mlx_lm model.
        lengths: tokens of prompts, which are drawn.
        repeats: turns of decoding, and the least number of chunks of prompts.
        tokens: that are written in a turn.
        say: called with what goes on.
    """
    mx.eval(model.parameters())
    found: dict[str, Any] = {"weights": mx.get_active_memory(), "lengths": {}}
    for length in (min(lengths), *lengths):  # the first warms up
        say(f"{length} tokens")
        found["lengths"][str(length)] = _of_length(model, length, repeats, tokens, say)
    return found


def _of_length(
    model: Any, length: int, repeats: int, tokens: int, say: Callable[[str], None]
) -> dict[str, Any]:
    rounds = math.ceil(repeats / math.ceil(length / PROMPT_CHUNK))
    mx.random.seed(0)
    prompt = mx.random.randint(0, vocabulary(model), (length + 1,))
    makes = _makes(model, prompt, say)
    arms = timed(model, makes, prompt, rounds=rounds, turns=repeats, tokens=tokens)
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


def _makes(model: Any, prompt: mx.array, say: Callable[[str], None]) -> dict[str, Make]:
    """Those that read a little and write on with this model, mlx_lm's first."""

    def stock() -> list[Any]:
        return list(mlx_lm_cache.make_prompt_cache(model))

    def packed() -> list[Any]:
        kind: Any = mlx_lm_cache.KVCache
        return [one.to_quantized(64, 8) if type(one) is kind else one for one in stock()]

    found: dict[str, Make] = {STOCK: stock, "mlx_lm, 8 bits": packed}
    for name, settings in OURS.items():
        found[name] = partial(make_prompt_cache, model, max(16, len(prompt) // 4), **settings)
    for name, make in [*found.items()]:
        try:
            timed(model, {name: make}, prompt[:18], turns=1, tokens=1)
        except (RuntimeError, ValueError) as error:
            say(f"not {name}: {error}")
            del found[name]
    return found
