"""The requirements on our caches with one model, and the verdict.

``python -m models.check NAME`` prints the verdict on one architecture as JSON.
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

import mlx_h2o
from mlx_h2o.lm.routing import evicting_caches
from readings import in_parts

from . import tiny
from .dequantised import DequantisedCache

BUDGET = 32
PROMPT = 48
STEPS = 40
_ROOM = 512
"""A budget that is never reached."""

# Float32 models of a few layers: what the order of additions may change in a logit.
_TOLERANCE = 2e-4


@dataclasses.dataclass
class Verdict:
    """What was found on one architecture.

    layers: caches of the model; evicting: those that are ours.
    h2o: empty where that policy's unbounded cache equals mlx_lm's own and its bounded one keeps
    its promises, else what went wrong; the same for ``keydiff``, which needs no scores, and for
    ``quantised``, h2o on rows of 8 bits (of keydiff where there are no scores).
    absent: why the model could not be tried; refused: why the product does not serve it.
    """

    name: str
    layers: int = 0
    evicting: int = 0
    absent: str = ""
    refused: str = ""
    h2o: str = ""
    keydiff: str = ""
    quantised: str = ""


def check(name: str) -> Verdict:
    """Try one architecture."""
    verdict = Verdict(name)
    try:
        model = tiny.build(name)
        caches = mlx_lm_cache.make_prompt_cache(model)
        verdict.layers = len(caches)
        if not any(_plain(cache) for cache in caches):
            verdict.absent = "no layer has a plain KVCache"
            return verdict
        # Before the model runs: what is refused may fail in mlx_lm as well.
        verdict.refused = _tried(lambda: mlx_h2o.make_prompt_cache(model, BUDGET))
        if verdict.refused:
            return verdict
        stock = _logits(model, mlx_lm_cache.make_prompt_cache(model), routed=False)
    except tiny.NotBuiltError as error:
        verdict.absent = str(error)
        return verdict
    except RuntimeError as error:
        if "No Metal back-end" not in str(error):
            raise
        verdict.absent = "its layers need a Metal device"
        return verdict

    def unbounded(policy: str) -> None:
        ours = mlx_h2o.make_prompt_cache(model, _ROOM, policy=policy)
        verdict.evicting = sum(any(evicting_caches([cache])) for cache in ours)
        _same(_logits(model, ours, routed=policy == "h2o-ema"), stock)

    def bounded(**settings: Any) -> None:
        ours = mlx_h2o.make_prompt_cache(model, BUDGET, **settings)
        routed = settings["policy"] == "h2o-ema" or ("kv_bits" in settings and not verdict.h2o)
        _finite(_logits(model, ours, routed=routed))
        for cache in evicting_caches(ours):
            _expect(cache.size() <= BUDGET, f"{cache.size()} rows, expected at most {BUDGET}")
            _expect(cache.offset == PROMPT + STEPS, f"offset {cache.offset}")
            _expect(cache.evicted > 0, "nothing was evicted")

    def quantised() -> None:
        policy = "keydiff" if verdict.h2o else "h2o-ema"
        settings = {"kv_bits": 8, "kv_group_size": 32, "policy": policy}
        ours = mlx_h2o.make_prompt_cache(model, _ROOM, kv_frame=False, **settings)
        handed = next(cache.config.kv_handed for cache in evicting_caches(ours))
        reference = [_replaced(cache, handed) for cache in mlx_lm_cache.make_prompt_cache(model)]
        expected = _logits(model, reference, routed=False)
        _same(_logits(model, ours, routed=not verdict.h2o), expected, 20 * _TOLERANCE)
        bounded(**settings)

    verdict.keydiff = _tried(lambda: (unbounded("keydiff"), bounded(policy="keydiff")))
    verdict.h2o = _tried(lambda: (unbounded("h2o-ema"), bounded(policy="h2o-ema")))
    verdict.quantised = _tried(quantised)
    return verdict


def _plain(cache: Any) -> bool:
    parts = getattr(cache, "caches", None)
    return any(map(_plain, parts)) if parts else type(cache) is mlx_lm_cache.KVCache


def _replaced(cache: Any, handed: str) -> Any:
    if type(cache) is mlx_lm_cache.KVCache:
        packed = {"packed": 8, "latents": 1}.get(handed, 0)
        return DequantisedCache(8, 32, latents=handed == "latents", packed=packed)
    if type(cache) is mlx_lm_cache.CacheList:
        return mlx_lm_cache.CacheList(*(_replaced(part, handed) for part in cache.caches))
    return cache


def _tried(attempt: Callable[[], object]) -> str:
    """Empty where the attempt succeeds, else the product's own reason; other errors go on."""
    try:
        attempt()
    except (ValueError, RuntimeError, _UnmetError) as error:
        return str(error)
    return ""


class _UnmetError(AssertionError):
    """A promise of the caches that was not kept."""


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise _UnmetError(f"broken: {what}")


def _finite(logits: mx.array) -> None:
    _expect(bool(mx.all(mx.isfinite(logits)).item()), "the logits are not finite")


def _same(found: mx.array, expected: mx.array, tolerance: float = _TOLERANCE) -> None:
    _finite(found)
    error = mx.max(mx.abs(found - expected)).item()
    scale = max(1.0, mx.max(mx.abs(expected)).item())
    _expect(error <= tolerance * scale, f"logits differ by {error:.2g} of {scale:.2g}")


def _logits(model: Any, caches: list[Any], *, routed: bool) -> mx.array:
    """Logits [1, PROMPT + STEPS, V] of fixed tokens: two chunks, then one by one."""
    mx.random.seed(7)
    tokens = mx.random.randint(1, 95, (PROMPT + STEPS,)).tolist()
    with mlx_h2o.routing(model) if routed else contextlib.nullcontext():
        return in_parts(model, caches, tokens, 20, PROMPT - 20).astype(mx.float32)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(check(sys.argv[1]))))
