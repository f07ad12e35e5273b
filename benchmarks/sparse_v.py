"""What the threshold of sparse V drops: rows skipped, and the error of the output.

    python benchmarks/sparse_v.py --json benchmarks/results/sparse_v.json

Decode attention over packed keys and values, with thresholds from 1e-4 to 1e-8 against 0 (Turney
2026, sections 3.2 and 4.8), on what the demo model computes over its text, and on synthetic long
contexts whose logits are normal with a given standard deviation. Two rules:

- exact, which the definition and the GPU kernels apply: a pair is skipped where its weight is below
  the threshold. The outputs come from the composed operation; on small samples the bytes of values
  that the emulated kernels read, and the share that they report, are checked against it.
- running, which a kernel of one sweep would apply: each simdgroup compares with the keys that it
  has seen so far. Its share comes from a NumPy model of that rule, and is why the kernels take two
  sweeps. The same rule with one state for all keys, in their order, shows what is lost because the
  simdgroups know nothing of each other.

A row counts as skipped where no query head of its KV head needs it, for then it need not be read.
Nothing here is a time: neither the emulator nor the composition says how fast a GPU is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3

import mlx_h2o
from mlx_h2o import demo, fast
from mlx_h2o.demo import report
from mlx_h2o.operations.gpu import launch
from mlx_h2o.operations.requests import attention_request

TESTS = Path(__file__).resolve().parents[1] / "tests"
THRESHOLDS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
GROUP_SIZE = 64
NAMES = ("pairs", "rows", "running_pairs", "running", "single", "mass", "error", "bound")


@dataclass(frozen=True)
class Sample:
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

    qwen3.scaled_dot_product_attention = noted
    try:
        mx.eval(model(mx.array([tokens])))
    finally:
        qwen3.scaled_dot_product_attention = original
    for queries, keys, values, scale in calls:
        for end in range(length - steps + 1, length + 1):
            arrays = (queries[:, :, end - 1 : end], keys[:, :, :end], values[:, :, :end])
            yield Sample(*(array.astype(mx.float32) for array in arrays), scale)


def synthetic_samples(length: int, deviation: float, seeds: int) -> Iterator[Sample]:
    """8 query heads on 2 KV heads of 128: logits with this standard deviation, in no order."""
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
            sample.queries,
            *packed,
            scale=sample.scale,
            bits=bits,
            group_size=GROUP_SIZE,
            sparse_v_threshold=threshold,
            return_lse=True,
        )
    return [np.array(array).astype(np.float64) for array in found]


def running_skips(scores: np.ndarray, threshold: float, simdgroups: int, blocks: int) -> np.ndarray:
    """The pairs that kernels of one sweep would skip, bool as scores [..., N].

    Simdgroup g of block b takes the keys b * simdgroups + g, and then every (simdgroups *
    blocks)-th one; a pair is skipped where exp(score - m) < threshold * l, with the maximum m and
    the denominator l of its simdgroup so far, the pair included.
    """
    skipped = np.zeros(scores.shape, bool)
    stride = simdgroups * blocks
    for first in range(min(stride, scores.shape[-1])):
        mine = scores[..., first::stride]
        skipped[..., first::stride] = mine < np.log(threshold) + np.logaddexp.accumulate(mine, -1)
    return skipped


def rows_of(pairs: np.ndarray, kv_heads: int) -> np.ndarray:
    """Rows [1, Hkv, N] that all query heads of their KV head skip, of pairs [1, Hq, 1, N]."""
    return pairs.reshape(1, kv_heads, -1, pairs.shape[-1]).all(axis=2)


def ablation(samples: list[Sample], bits: int) -> dict[str, Any]:
    """For each threshold: shares skipped, dropped mass, and error of the output."""
    found: dict[float, dict[str, list[float]]] = {
        threshold: {name: [] for name in NAMES} for threshold in THRESHOLDS
    }
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
        simdgroups = launch.preferred_simdgroups(*(array.shape[-1] for array in
                                                   (sample.keys, sample.values)))  # fmt: skip
        blocks = launch.preferred_blocks(scores.shape[-1], simdgroups)
        for threshold, each in found.items():
            out, _, _ = attention(sample, packed, bits, threshold)
            below = weights < threshold
            running = running_skips(scores, threshold, simdgroups, blocks)
            # float32 may decide otherwise where a weight meets the threshold to the last digits.
            assert not (running & (weights > threshold * (1 + 1e-4))).any()
            mass = np.where(below, weights, 0.0).sum(-1)
            each["pairs"].append(below.mean())
            each["rows"].append(rows_of(below, kv_heads).mean())
            each["running_pairs"].append(running.mean())
            each["running"].append(rows_of(running, kv_heads).mean())
            single = running_skips(scores, threshold, 1, 1)
            each["single"].append(rows_of(single, kv_heads).mean())
            each["mass"].append(mass.max())
            each["error"].append(np.abs(out - full).max() / largest)
            each["bound"].append(threshold * scores.shape[-1])
    return {
        "steps": len(samples),
        "worst_error_of_packing": max(packing),
        "thresholds": [
            {
                "threshold": threshold,
                "pairs_below": float(np.mean(each["pairs"])),
                "rows_skipped_exact": float(np.mean(each["rows"])),
                "pairs_skipped_running": float(np.mean(each["running_pairs"])),
                "rows_skipped_running": float(np.mean(each["running"])),
                "rows_skipped_running_single": float(np.mean(each["single"])),
                "worst_dropped_mass": float(max(each["mass"])),
                "bound_of_dropped_mass": float(max(each["bound"])),
                "worst_error": float(max(each["error"])),
                "mean_error": float(np.mean(each["error"])),
            }
            for threshold, each in found.items()
        ],
    }


def emulated(samples: list[tuple[str, Sample]], bits: int) -> list[dict[str, Any]]:
    """Rows whose values the emulated kernels do not read, beside those that no head needs.

    In one launch for the two sweeps, and in one for each; and the shares of pairs that they report.
    """
    sys.path[:0] = [str(TESTS), str(TESTS / "lib")]
    from emulator.backend import EmulatorBackend
    from emulator.kernel import Run

    results = []
    for name, sample in samples:
        packed = sample.packed(bits)
        _, scores, lse = attention(sample, packed, bits, 0.0)
        weights = np.exp(scores - lse[..., None])
        simdgroups = launch.preferred_simdgroups(sample.keys.shape[-1], sample.values.shape[-1])
        for blocks in (1, 2):
            for threshold in THRESHOLDS:
                request = attention_request(
                    sample.queries,
                    tuple(packed[:3]),
                    tuple(packed[3:]),
                    scale=sample.scale,
                    bits=bits,
                    group_size=GROUP_SIZE,
                    sparse_v_threshold=threshold,
                    return_skipped=True,
                )
                run = Run(reads={})
                backend = EmulatorBackend(run, simdgroups=simdgroups, blocks=blocks)
                skipped = backend.attention(request)[3]
                pairs = weights < threshold
                rows = rows_of(pairs, sample.keys.shape[1])
                results.append(
                    {
                        "sample": name,
                        "rows": rows.size,
                        "threshold": threshold,
                        "simdgroups": simdgroups,
                        "blocks": blocks,
                        "rows_skipped_by_bytes": 1 - run.reads["value_words"] / packed[3].nbytes,
                        "rows_skipped_by_model": float(rows.mean()),
                        "pairs_skipped_reported": float(mx.mean(skipped)),
                        "pairs_skipped_by_model": float(pairs.mean()),
                    }
                )
    return results


def most_skipped(samples: list[Sample]) -> Sample:
    """The sample where most rows are skipped at 1e-4."""

    def skipped(sample: Sample) -> float:
        _, scores, lse = attention(sample, sample.packed(8), 8, 0.0)
        pairs = np.exp(scores - lse[..., None]) < 1e-4
        return float(rows_of(pairs, sample.keys.shape[1]).mean())

    return max(samples, key=skipped)


def table(result: dict[str, Any], bits: int = 8, threshold: float | None = None) -> str:
    """A line per sample and threshold; of one threshold only, where it is given."""
    lines = [
        "| sample | threshold | pairs, exact | pairs, running | rows, exact | rows, running "
        "| rows, one state | worst dropped mass | worst error | mean error |",
        f"|{'---|' * 10}",
    ]
    for source in result["sources"]:
        if source["bits"] != bits:
            continue
        for each in source["thresholds"]:
            if threshold not in (None, each["threshold"]):
                continue
            lines.append(
                f"| {source['source']} | {each['threshold']:.0e} "
                f"| {each['pairs_below']:.1%} | {each['pairs_skipped_running']:.1%} "
                f"| {each['rows_skipped_exact']:.1%} | {each['rows_skipped_running']:.1%} "
                f"| {each['rows_skipped_running_single']:.1%} | {each['worst_dropped_mass']:.1e} "
                f"| {each['worst_error']:.1e} | {each['mean_error']:.1e} |"
            )
    return "\n".join(lines)


def summary(result: dict[str, Any]) -> str:
    """A line per threshold: the worst of all samples."""
    lines = [
        "| threshold | worst error, in parts of what packing itself errs | worst dropped mass |",
        f"|{'---|' * 3}",
    ]
    for threshold in THRESHOLDS:
        found = [
            (each["worst_error"] / source["worst_error_of_packing"], each["worst_dropped_mass"])
            for source in result["sources"]
            for each in source["thresholds"]
            if each["threshold"] == threshold
        ]
        error, mass = (max(column) for column in zip(*found, strict=True))
        lines.append(f"| {threshold:.0e} | {error:.2g} | {mass:.1e} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=8, help="queries of each layer of the demo")
    parser.add_argument("--seeds", type=int, default=2, help="of each synthetic context")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--no-emulator", action="store_true", help="leave out the emulated sample")
    arguments = parser.parse_args()
    sources: dict[str, list[Sample]] = {
        f"demo, {length} tokens": list(demo_samples(length, arguments.steps))
        for length in (256, 1024)
    }
    for length in arguments.lengths:
        for deviation in (1.0, 2.0, 4.0):
            sources[f"synthetic, {length} tokens, deviation {deviation:g}"] = list(
                synthetic_samples(length, deviation, arguments.seeds)
            )
    result: dict[str, Any] = {
        "environment": report.environment() | {"backend": "composed"},
        "group_size": GROUP_SIZE,
        "errors": "relative to the largest value of the sample",
        "sources": [],
    }
    for name, samples in sources.items():
        for bits in (8, 4):
            found = ablation(samples, bits)
            result["sources"].append({"source": name, "bits": bits, **found})
            print(f"{name}, {bits} bits: packing errs by {found['worst_error_of_packing']:.1e}")
            for each in found["thresholds"]:
                print(
                    f"  {each['threshold']:.0e}: rows skipped {each['rows_skipped_exact']:6.1%} "
                    f"exact, {each['rows_skipped_running']:6.1%} running, "
                    f"{each['rows_skipped_running_single']:6.1%} with one state; mass dropped "
                    f"{each['worst_dropped_mass']:.1e}; error {each['worst_error']:.1e} worst, "
                    f"{each['mean_error']:.1e} mean"
                )
    if not arguments.no_emulator:
        small = [
            (name, most_skipped(samples)) for name, samples in sources.items() if "demo" in name
        ]
        small.append(("synthetic, 512 tokens, deviation 4", *synthetic_samples(512, 4.0, 1)))
        result["emulated"] = emulated(small, 8)
        for each in result["emulated"]:
            found, expected = each["rows_skipped_by_bytes"], each["rows_skipped_by_model"]
            print(
                f"  emulated {each['sample']}, {each['threshold']:.0e}, {each['simdgroups']} x "
                f"{each['blocks']}: {found:.4f}, model {expected:.4f}"
            )
    print(table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
