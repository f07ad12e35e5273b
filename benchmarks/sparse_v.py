"""What the threshold of sparse V drops: rows skipped, and the error of the output.

    python benchmarks/sparse_v.py --json benchmarks/results/sparse_v.json

Decode attention over packed keys and values, with thresholds from 1e-4 to 1e-8 against 0 (Turney
2026, sections 3.2 and 4.8), on rows of the demo model over its text, and on synthetic long contexts
whose logits are normal with a given standard deviation. A pair is skipped if its weight is below
the threshold. The outputs come from the composed operation.

A row counts as skipped if no query head of its KV head needs it, because then it need not be read.
Nothing is timed: the composition does not show how fast a GPU is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3

import mlx_h2o
from lib import common
from mlx_h2o import demo, fast
from mlx_h2o.evaluation.environment import environment

THRESHOLDS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
GROUP_SIZE = 64
WORST = ("worst_dropped_mass", "bound_of_dropped_mass", "worst_error")
"""Figures whose maximum over all samples is kept; of others the mean."""


class Sample(NamedTuple):
    """Queries [1, Hq, 1, D] of one decode step, and float32 keys and values [1, Hkv, N, D]."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float

    def packed(self, bits: int) -> list[mx.array]:
        return [
            array
            for rows in (self.keys, self.values)
            for array in mx.quantize(rows, group_size=GROUP_SIZE, bits=bits)
        ]


def demo_samples(length: int, steps: int) -> Iterator[Sample]:
    """Every layer's last ``steps`` queries over the first ``length`` tokens of the demo's text."""
    model, tokenizer = mlx_h2o.load("demo")
    tokens = tokenizer.encode(demo.text())[:length]
    if len(tokens) < length:
        raise ValueError(f"the text has {len(tokens)} tokens, expected {length}")
    calls: list[tuple[mx.array, mx.array, mx.array, float]] = []
    original = qwen3.scaled_dot_product_attention

    def noted(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        calls.append((queries, keys, values, options["scale"]))
        return original(queries, keys, values, **options)

    with mock.patch.object(qwen3, "scaled_dot_product_attention", noted):
        mx.eval(model(mx.array([tokens])))
    for queries, keys, values, scale in calls:
        for end in range(length - steps + 1, length + 1):
            arrays = (queries[:, :, end - 1 : end], keys[:, :, :end], values[:, :, :end])
            yield Sample(*(array.astype(mx.float32) for array in arrays), scale)


def synthetic_samples(length: int, deviation: float, seeds: int) -> Iterator[Sample]:
    """8 query heads on 2 KV heads of 128: logits with this standard deviation, in random order."""
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        queries = rng.standard_normal((1, 8, 1, 128))
        queries *= deviation * np.sqrt(128) / np.linalg.norm(queries, axis=-1, keepdims=True)
        rows = (rng.standard_normal((1, 2, length, 128)) for _ in range(2))
        arrays = (mx.array(array.astype(np.float32)) for array in (queries, *rows))
        yield Sample(*arrays, 128**-0.5)


def attention(sample: Sample, packed: list[mx.array], bits: int, threshold: float) -> list[Any]:
    """out, scores and lse as float64, by the composed definition."""
    with mlx_h2o.use_backend("composed"):
        found = fast.scaled_dot_product_attention_quantized_with_scores(
            sample.queries, *packed, scale=sample.scale, bits=bits, sparse_v_threshold=threshold,
            return_lse=True,
        )  # fmt: skip
    return [np.array(array).astype(np.float64) for array in found]


def rows_of(pairs: np.ndarray, kv_heads: int) -> np.ndarray:
    """Rows [1, Hkv, N] that all query heads of their KV head skip, of pairs [1, Hq, 1, N]."""
    return pairs.reshape(1, kv_heads, -1, pairs.shape[-1]).all(axis=2)


def ablation(samples: list[Sample], bits: int) -> dict[str, Any]:
    """For each threshold: shares skipped, dropped mass, and error of the output."""
    found: dict[float, list[dict[str, float]]] = {threshold: [] for threshold in THRESHOLDS}
    packing = []
    for sample in samples:
        packed = sample.packed(bits)
        full, scores, lse = attention(sample, packed, bits, 0.0)
        weights = np.exp(scores - lse[..., None])
        kv_heads = sample.keys.shape[1]
        dequantised = mx.dequantize(*packed[3:], group_size=GROUP_SIZE, bits=bits)
        largest = float(mx.abs(dequantised).max())
        dense, _ = fast.scaled_dot_product_attention_with_scores(
            sample.queries, sample.keys, sample.values, scale=sample.scale
        )
        packing.append(float(np.abs(full - np.array(dense)).max()) / largest)
        for threshold, each in found.items():
            out, _, _ = attention(sample, packed, bits, threshold)
            below = weights < threshold
            error = np.abs(out - full).max() / largest
            each.append({
                "pairs_below": below.mean(),
                "rows_skipped_exact": rows_of(below, kv_heads).mean(),
                "worst_dropped_mass": np.where(below, weights, 0.0).sum(-1).max(),
                "bound_of_dropped_mass": threshold * scores.shape[-1],
                "worst_error": error,
                "mean_error": error,
            })  # fmt: skip
    return {
        "steps": len(samples),
        "worst_error_of_packing": max(packing),
        "thresholds": [
            {"threshold": threshold}
            | {
                name: float((max if name in WORST else np.mean)([one[name] for one in each]))
                for name in each[0]
            }
            for threshold, each in found.items()
        ],
    }


def main() -> None:
    args = common.arguments(__doc__, steps=8, seeds=2, lengths=(4096, 32768))
    sources: dict[str, list[Sample]] = {
        f"demo, {length} tokens": list(demo_samples(length, args.steps)) for length in (256, 1024)
    }
    for length in args.lengths:
        for deviation in (1.0, 2.0, 4.0):
            sources[f"synthetic, {length} tokens, deviation {deviation:g}"] = list(
                synthetic_samples(length, deviation, args.seeds)
            )
    found = []
    for name, samples in sources.items():
        for bits in (8, 4):
            found.append({"source": name, "bits": bits, **ablation(samples, bits)})
            for each in found[-1]["thresholds"]:
                common.show(f"{name}, {bits} bits", each)
    composed = environment() | {"backend": "composed"}
    errors = "relative to the largest value of the sample"
    result = {"environment": composed, "group_size": GROUP_SIZE, "errors": errors}
    common.save(args.json, result | {"sources": found})


if __name__ == "__main__":
    main()
