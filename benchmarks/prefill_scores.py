"""Time and peak memory of prefill_scores, beside MLX's attention for the same chunk.

    python benchmarks/prefill_scores.py --json benchmarks/results/prefill_scores.json

"whole" is what prefill_scores replaces: the scores of the last 128 queries ("ema"), or of all of
them ("mass"), in memory at once. Each time is the fastest of three; memory is the peak of MLX's
allocations above the level before the call.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from lib import common
from mlx_h2o import fast
from mlx_h2o.operations import composed, requests
from mlx_h2o.operations.composed import accumulating, prefill

SIZE = 64
SCALE = SIZE**-0.5
# Query heads, KV heads, queries of the chunk, keys.
SHAPES = ((8, 2, 512, 2048), (32, 8, 512, 2048), (32, 8, 512, 8192))
REPEATS = 3


def measured(call: Callable[[], mx.array]) -> dict[str, float]:
    """Seconds and peak MiB of one call."""
    mx.eval(call())
    seconds = min(timeit.repeat(lambda: mx.eval(call()), number=1, repeat=REPEATS))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(call())
    peak = (mx.get_peak_memory() - before) / 2**20
    return {"seconds": round(seconds, 3), "peak_mib": round(peak, 1)}


def rows_of(heads: int, kv_heads: int, queries: int, keys: int) -> dict[str, dict[str, float]]:
    """Time and memory of every method for one shape."""
    q, k = mx.random.normal((1, heads, queries, SIZE)), mx.random.normal((1, kv_heads, keys, SIZE))
    mx.eval(q, k)
    options: dict[str, Any] = {"scale": SCALE, "mask": "causal"}

    def whole_average() -> mx.array:
        nothing, scores = mx.full((1, kv_heads, keys), mx.nan), prefill.last_scores(q, k, **options)
        return accumulating.accumulate_scores(nothing, scores, decay=0.95)

    def whole_mass() -> mx.array:
        scores = composed.logits(requests.attention_request(q, k, k, **options))
        return composed.weights(scores).reshape(1, kv_heads, -1, keys).sum(axis=2)

    return {
        "attention of MLX": measured(
            lambda: mx.fast.scaled_dot_product_attention(q, k, k, **options)
        ),
        "ema, whole": measured(whole_average),
        "ema": measured(lambda: fast.prefill_scores(q, k, **options)),
        "mass, whole": measured(whole_mass),
        "mass": measured(lambda: fast.prefill_scores(q, k, kind="mass", **options)),
    }


def main() -> None:
    args = common.arguments(__doc__)
    results = []
    for shape in SHAPES:
        of = dict(zip(("heads", "kv_heads", "queries", "keys"), shape, strict=True))
        results.append(of | {"ways": rows_of(*shape)})
        for name, found in results[-1]["ways"].items():
            common.show(f"{shape}: {name}", found)
    common.save(args.json, {"head_size": SIZE, "shapes": results})


if __name__ == "__main__":
    main()
