"""Bytes of bounded caches in the shape of Qwen3-8B, and the memory of a process that holds them.

    python benchmarks/cache_bytes.py --json benchmarks/results/cache_bytes.json

Random rows in float16: 8 KV heads of 128 elements in each layer. First, one layer after 2048 tokens
with a budget of 256 rows and the policy h2o, as in AtomGradient 2026, section 4.8: `nbytes`, split
into codes or numbers, scales and biases, and the rest. Then 32K tokens with a budget of 2048 rows,
each cache in its own process: the memory that it holds, and its peaks during prefill and decoding.
Like mlx_lm, chunks and steps are evaluated for all layers at once; attention in a layer has 8 query
heads and covers the last 128 queries of a chunk, beside arrays of all rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from lib import common
from mlx_h2o import H2OConfig
from mlx_h2o.caches.cache import evicting_cache

HEADS, SIZE = 8, 128
SCALE = SIZE**-0.5
QUERIES = 128
CHUNK = 2048
"""Tokens per chunk, as in mlx_lm."""
STEPS = H2OConfig().budget.evict_every
"""Tokens decoded one by one after the prompt, which fill the cache again."""

# Name, settings, and the compression that the paper states at 2048 tokens to 256 rows.
ARMS: dict[str, tuple[dict[str, Any], str]] = {
    "dense": ({}, "~8x"),
    "8 bits": ({"kv_bits": 8}, "~16x"),
    "8 and 4 bits by rank, newest 32 dense": ({"kv_bits": 8, "light_bits": 4}, "~21x"),
    "K8/V4, newest 32 dense": ({"kv_bits": 8, "v_bits": 4, "dense_size": 32}, ""),
    "K8/V4": ({"kv_bits": 8, "v_bits": 4}, ""),
    "4 bits": ({"kv_bits": 4}, "~32x"),
}
FULL = "full cache"


def rows(length: int, seed: int, layer: int = 0) -> mx.array:
    """Random rows [1, 8, length, 128], float16."""
    key = mx.random.key(1000 * seed + layer)
    return mx.random.normal((1, HEADS, length, SIZE), mx.float16, key=key)


def cache_of(name: str, budget: int) -> Any:
    """An empty cache for an arm."""
    if name == FULL:
        return KVCache()
    return evicting_cache(H2OConfig.of(max_kv_size=budget, policy="h2o-ema", **ARMS[name][0]))


def chunk(caches: list[Any], length: int, seed: int) -> None:
    """Process ``length`` tokens, with one evaluation for all layers."""
    before = mx.zeros((), mx.float16)
    outs = []
    for layer, cache in enumerate(caches):
        new = rows(length, seed, layer) + before  # a layer depends on the one below it
        keys, values = cache.update_and_fetch(new, new)
        queries = new[:, :, -QUERIES:]
        out = keys[0, 0, 0, 0] + values[0, 0, 0, 0]
        if hasattr(cache, "attend"):  # only computes scores
            given = {"mask": "causal", "stock": lambda found=out: found}
            out = cache.attend(queries, keys, values, scale=SCALE, **given)
        before = 0 * out
        outs.append(before)
    mx.eval(outs, [cache.state for cache in caches])


def step(caches: list[Any], seed: int) -> None:
    """Decode one token."""
    before = mx.zeros((), mx.float16)
    for layer, cache in enumerate(caches):
        new = rows(1, seed, layer) + before
        keys, values = cache.update_and_fetch(new, new)
        if hasattr(cache, "attend"):
            out = cache.attend(new, keys, values, scale=SCALE)
        else:
            out = mx.fast.scaled_dot_product_attention(new, keys, values, scale=SCALE)
        before = 0 * out[0, 0, 0, 0]
    mx.eval(before)


def one_layer(name: str, tokens: int, budget: int) -> dict[str, Any]:
    """Bytes of one layer, in total and by kind."""
    cache = cache_of(name, budget)
    chunk([cache], tokens - STEPS, 0)
    for index in range(STEPS):
        step([cache], 1 + index)
    arrays = [array for _, array in tree_flatten([cache.keys, cache.values])]
    groups = [a for a in arrays if a.shape[3] < SIZE and a.dtype != mx.uint32]
    scales = sum(array.nbytes for array in groups)
    stored = sum(array.nbytes for array in arrays)
    return {
        "bytes": cache.nbytes,
        "rows": cache.size(),
        "codes_or_numbers": stored - scales,
        "scales_and_biases": scales,
        "scores_positions_and_centres": cache.nbytes - stored,
    }


def seed_setting() -> dict[str, dict[str, Any]]:
    """2048 tokens to 256 rows, one layer."""
    whole = 2 * 2048 * HEADS * SIZE * 2
    found = {}
    for name, (_, stated) in ARMS.items():
        one = one_layer(name, 2048, 256)
        codes = one["codes_or_numbers"]
        found[name] = one | {
            "compression": whole / one["bytes"],
            "compression_of_codes_alone": whole / codes,
            "stated": stated,
        }
    return found


def _forget_peaks() -> None:
    mx.clear_cache()
    mx.reset_peak_memory()
    Path("/proc/self/clear_refs").write_text("5")


def _peaks(idle: int) -> dict[str, int]:
    return {"mlx_peak": mx.get_peak_memory(), "process_peak": common.memory("VmHWM") - idle}


def process(name: str, tokens: int, budget: int, layers: int, length: int) -> dict[str, Any]:
    """Memory peaks of this process, which should be a new one."""
    caches = [cache_of(name, budget) for _ in range(layers)]
    mx.eval(rows(1, 0))
    _forget_peaks()
    idle = common.memory("VmHWM")
    for index in range(tokens // length):
        chunk(caches, length, index)
    reading = _peaks(idle)
    for cache in caches:
        if name != FULL:
            cache.flush()
    found: dict[str, Any] = {"bytes": sum(one.nbytes for one in caches), "reading": reading}
    step(caches, tokens)
    _forget_peaks()
    for index in range(32):
        step(caches, tokens + 1 + index)
    found["writing"] = _peaks(idle)
    return found


def main() -> None:
    args = common.arguments(__doc__, tokens=32768, layers=8)
    small = seed_setting()
    for name, one in small.items():
        common.show(name, one)
    large = {}
    for name in (FULL, *ARMS):
        numbers = args.tokens, 2048, args.layers, CHUNK
        large[name] = common.in_a_process(process, name, *numbers)
        common.show(name, large[name])
    found = {"tokens": args.tokens, "budget": 2048, "layers": args.layers, "chunk": CHUNK}
    shape = {"kv_heads": HEADS, "head_size": SIZE, "dtype": "float16"}
    common.save(
        args.json,
        {"shape": shape, "one_layer_2048_to_256": small, "processes": {**found, "arms": large}},
    )


if __name__ == "__main__":
    main()
