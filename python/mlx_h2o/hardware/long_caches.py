"""Values that sparse V leaves out, and caches that fill row by row: time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..caches.cache import H2OKVCache
from ..config import H2OConfig
from ..evaluation.statistics import in_turns, ratios
from ..fast import scaled_dot_product_attention_quantized_with_scores as quantized_attention
from ..operations.backends import resolve
from ..operations.requests import Packed

_HEADS, _SIZE, _THRESHOLD, _CALLS = 8, 128, 1e-6, 20


def sparse_v(rows: int, repeats: int) -> dict[str, Any]:
    """Attention of a query of 32 heads over rows of 8 bits whose logits lie far apart: the share of
    values that is left out, and how many times as fast it is then, in turns."""
    mx.random.seed(0)
    q = (4 * mx.random.normal((1, 4 * _HEADS, 1, _SIZE))).astype(mx.float16)
    dense = mx.random.normal((2, 1, _HEADS, rows, _SIZE)).astype(mx.float16)
    keys, values = (cast(Packed, tuple(mx.quantize(one, bits=8))) for one in dense)
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
    share = cast(float, mx.mean(skipped).item())
    return {"rows": rows, "threshold": _THRESHOLD, "skipped": share,
            "speed": ratios(whole, sparse, 3)}  # fmt: skip


def growth(rows: int, repeats: int) -> dict[str, Any]:
    """Caches without a budget: bytes at an eighth, half and all of the rows, the peak, and the time
    beside mlx_lm's."""

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

    makes = {"mlx_lm": KVCache, "grows": ours(), "preallocated": ours(preallocate=rows)}
    turns = in_turns({name: partial(filled, make) for name, make in makes.items()}, repeats)
    times = {name: [seconds for seconds, _ in found] for name, found in turns.items()}
    return {
        name: found[-1][1] | {"time_to_mlx_lm": ratios(times[name], times["mlx_lm"], 3)}
        for name, found in turns.items()
    }
