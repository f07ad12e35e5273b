"""Codes of rotated rows beside affine rows: the error and the time of attention.

    python benchmarks/turbo.py --json benchmarks/results/turbo.json

The error compares the output of decode attention with float64 over the original rows, relative to
the length of that output: the root mean square over all queries and heads, on rows of the demo
model over its text. Bytes count words, scales, biases and norms of a key and its value, for rows in
float16.

The time is that of one query over 16,384 rows, Hq = 16, Hkv = 8, D = 128, native, cycling through
at least 256 MB of KV caches; arms take turns in rotating order, and a ratio compares a turn with
float16's turn in the same round.

The effect on a model is measured by `mlx_h2o evaluate`, at equal bytes, with arms such as
"turbo4: kv_format=turbo4 max_kv_size=None policy=window".
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from native_attention import Arm, Layer, arrays, dense_layer, make_layers, ours, random_queries
from sparse_v import Sample, demo_samples

import mlx_h2o
from lib import common
from mlx_h2o.config import KV_FORMATS
from mlx_h2o.evaluation.statistics import in_turns, ratios, spread
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.composed import turbo

AFFINE = {f"affine {bits}": (bits, bits) for bits in (8, 4, 3, 2)} | {"affine 8, 3": (8, 3)}
FORMATS = ("turbo4", "turbo3", "turbo2", "turbo8v4", "turbo8v3", "turbo0v3", "turbo0v2")
ARMS = ("float16", *AFFINE, *FORMATS)
ROWS = 16384

Stored = tuple[Any, Any, dict[str, Any]]
"""Keys, values, and the arguments that tell attention how they are packed."""


def stored(name: str, keys: mx.array, values: mx.array) -> Stored:
    """Rows in the format of the arm with this name."""
    if name == "float16":
        return keys, values, {}
    bits, v_bits = AFFINE.get(name) or KV_FORMATS[name]

    def side(rows: mx.array, width: int, seed: int) -> Any:
        if width == 0:
            return rows
        if name in AFFINE or width == 8:
            return tuple(mx.quantize(rows, bits=width))
        return tuple(resolve().encode_rows(rows, width, seed))

    settings = {"bits": bits or 8, "v_bits": v_bits}
    return side(keys, bits, turbo.KEYS), side(values, v_bits, turbo.VALUES), settings


def bytes_of_a_row(rows: Layer) -> float:
    """Bytes of a key and its value in one head."""
    parts = arrays(rows)
    batch, heads, count = parts[0].shape[:3]
    return sum(part.nbytes for part in parts) / (batch * heads * count)


def exact(sample: Sample) -> np.ndarray:
    """The output in float64."""
    q, k, v = (np.array(a.astype(mx.float32), np.float64) for a in sample[:3])
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    logits = sample.scale * q @ k.swapaxes(2, 3)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def errors(samples: list[Sample]) -> dict[str, Any]:
    """Bytes per row and the error of each arm."""
    found: dict[str, Any] = {}
    for name in ARMS:
        wrong = length = size = 0.0
        for sample in samples:
            q, k, v = (array.astype(mx.float16) for array in sample[:3])
            keys, values, settings = stored(name, k, v)
            size = bytes_of_a_row((keys, values))
            if settings:  # then queries are float32, and so are unquantised keys beside codes
                q = q.astype(mx.float32)
                keys = keys.astype(mx.float32) if isinstance(keys, mx.array) else keys
            out = resolve().attention(q, keys, values, scale=sample.scale, **settings)[0]
            expected = exact(sample)
            wrong += float(((np.array(out.astype(mx.float32)) - expected) ** 2).sum())
            length += float((expected**2).sum())
        found[name] = {"bytes": size, "error": round((wrong / length) ** 0.5, 5)}
    return found


def times(rows: int, repeats: int, threads: int) -> dict[str, Any]:
    """Milliseconds of one attention, and the ratio to float16 in the same round."""
    before, queries, arms = mlx_h2o.threads(), random_queries(), {}
    for name in ARMS:
        layers = make_layers(lambda name=name: stored(name, *dense_layer(rows, mx.float16))[:2])
        settings = stored(name, *dense_layer(64, mx.float16))[2]
        arms[name] = Arm(partial(ours, **settings), queries, layers, threads)
    in_turns(arms, 1)  # warms up
    turns = in_turns(arms, repeats)
    mlx_h2o.set_threads(before)
    return {
        name: {
            "milliseconds": spread([1e3 * one for one in own]),
            "ratio_to_float16": ratios(own, turns["float16"]),
        }
        for name, own in turns.items()
    }


def main() -> None:
    args = common.arguments(__doc__, steps=8, rows=ROWS, repeats=15)
    samples = list(demo_samples(512, args.steps))
    result = {
        "errors": {f"demo model, {samples[0].keys.shape[3]} elements": errors(samples)},
        "rows": args.rows,
        "times": {str(threads): times(args.rows, args.repeats, threads) for threads in (1, 2)},
    }
    common.save(args.json, result)
    for kind in ("errors", "times"):
        for title, arms in result[kind].items():
            for name, one in arms.items():
                common.show(f"{kind}, {title}, {name}", one)


if __name__ == "__main__":
    main()
