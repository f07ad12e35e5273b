"""What a scale for each dimension of keys, calibrated on a text, gives codes of rotated rows.

    python benchmarks/turbo_keys.py --models demo benchmarks/yardsticks/llama --corpora DIR
        --json benchmarks/results/turbo_keys.json

A scale s_d for each dimension, layer and KV head comes from the keys of one text. Two choices:

- "rotated keys", as mlx-swift-lm has it: the deviation of dimension d of the rotated directions
  over its mean over d, clipped to 1/4 and 4. Codes are those of the direction divided by s, and the
  norm makes what comes back as long as the key.
- "keys and queries": before the rotation key dimension d is divided by s_d = sqrt(|k_d| / |q_d|)
  and that of queries multiplied by it, |.| being the root of the mean square. What codes add to the
  logits has a variance as E (sum_d s_d^2 q_d^2) (sum_d k_d^2 / s_d^2), and this is where the
  product of the means is least.

The divergence of the next token from that of the model as it is, is measured on other texts, those
of benchmarks/policies.py. Keys and values become codes and come back before attention, for all
tokens of a document at once; values are never scaled.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import policy_documents

import mlx_h2o
from mlx_h2o.demo import report
from mlx_h2o.evaluation.environment import blas
from mlx_h2o.evaluation.statistics import paired
from mlx_h2o.operations import turbo

BITS = (4, 3, 2)


Scales = Callable[[mx.array, mx.array], mx.array]
"""s [1, Hkv, 1, D] of queries [1, Hq, T, D] and keys [1, Hkv, T, D] in float32."""

Coded = Callable[[mx.array, int, mx.array], mx.array]
"""What comes back of keys [1, Hkv, T, D] in codes of so many bits, with the scales."""


def of_rotated_keys(queries: mx.array, keys: mx.array) -> mx.array:
    deviations = mx.std(turbo.rotated(keys / norms(keys), turbo.KEYS), axis=(0, 2), keepdims=True)
    return mx.clip(deviations / mx.mean(deviations, axis=-1, keepdims=True), 0.25, 4.0)


def of_both(queries: mx.array, keys: mx.array) -> mx.array:
    heads = keys.shape[1]
    of_a_group = mx.square(queries).reshape(heads, -1, queries.shape[-1]).mean(axis=1)
    of_keys = mx.square(keys).mean(axis=(0, 2))
    return mx.power(of_keys / of_a_group, 0.25)[None, :, None]


def norms(rows: mx.array) -> mx.array:
    return mx.linalg.norm(rows, axis=-1, keepdims=True)


def coded(rows: mx.array, bits: int, seed: int) -> mx.array:
    """What comes back of rows."""
    return turbo.decode_rows(*turbo.encode_rows(rows, bits, seed), bits, seed, mx.float32)


def scaled_rotated(keys: mx.array, bits: int, scales: mx.array) -> mx.array:
    lengths = norms(keys)
    found = turbo.rotated(keys / lengths, turbo.KEYS) / scales
    levels = turbo.levels(keys.shape[-1], bits)
    codes = sum(found > (low + high) / 2 for low, high in itertools.pairwise(levels))
    back = turbo.codebook(keys.shape[-1], bits)[codes] * scales
    return turbo.restored(back * (lengths / norms(back)), turbo.KEYS)


def scaled_keys(keys: mx.array, bits: int, scales: mx.array) -> mx.array:
    return coded(keys / scales, bits, turbo.KEYS) * scales


SCALES: dict[str, tuple[Scales, Coded]] = {
    "rotated keys": (of_rotated_keys, scaled_rotated),
    "keys and queries": (of_both, scaled_keys),
}


class Attention:
    """Stands in for a model's attention: notes the scales of its keys, or uses those noted."""

    def __init__(self, model: Any) -> None:
        self.module = importlib.import_module(type(model).__module__)
        self.original = self.module.scaled_dot_product_attention
        self.model = model
        self.scales: dict[str, list[mx.array]] = {name: [] for name in SCALES}

    def calibrate(self, tokens: mx.array) -> None:
        def noting(queries: mx.array, keys: mx.array, values: mx.array, **given: Any) -> mx.array:
            for name, (scales, _) in SCALES.items():
                wide = (array.astype(mx.float32) for array in (queries, keys))
                self.scales[name].append(scales(*wide))
            return self.original(queries, keys, values, **given)

        self._run(noting, tokens)

    def exact(self, tokens: mx.array) -> mx.array:
        """Logarithms of the weights of the next tokens, [B, T, V]."""
        return self._run(self.original, tokens)

    def coded(self, tokens: mx.array, bits: int, scales: str | None) -> mx.array:
        """The same over codes of so many bits, with the scales of this name."""
        of_layers = iter(self.scales[scales]) if scales else None

        def coding(queries: mx.array, keys: mx.array, values: mx.array, **given: Any) -> mx.array:
            wide = keys.astype(mx.float32)
            if scales is None or of_layers is None:
                keys = coded(wide, bits, turbo.KEYS)
            else:
                keys = SCALES[scales][1](wide, bits, next(of_layers))
            values = coded(values.astype(mx.float32), bits, turbo.VALUES)
            rows = (array.astype(queries.dtype) for array in (keys, values))
            return self.original(queries, *rows, **given)

        return self._run(coding, tokens)

    def _run(self, attention: Any, tokens: mx.array) -> mx.array:
        with mock.patch.object(self.module, "scaled_dot_product_attention", attention):
            logits: mx.array = self.model(tokens).astype(mx.float32)
        weights = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(weights)
        return weights


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = mlx_h2o.load(name)
    documents = policy_documents.documents(tokenizer, args.corpora, length=args.length, facts=4)
    first, *others = [mx.array([document.planted.tokens]) for document in documents]
    attention = Attention(model)
    attention.calibrate(first)
    arms = (None, *SCALES)
    found: dict[str, dict[str, list[float]]] = {
        str(bits): {arm or "none": [] for arm in arms} for bits in BITS
    }
    for tokens in others[: args.documents]:
        exact = attention.exact(tokens)
        for bits in BITS:
            for arm in arms:
                difference = exact - attention.coded(tokens, bits, arm)
                divergence: Any = (mx.exp(exact) * difference).sum(axis=-1).mean()
                found[str(bits)][arm or "none"].append(divergence.item())
    return {
        "model": Path(name).name,
        "documents": len(others[: args.documents]),
        "divergence": found,
        "to_none": {
            bits: {arm: vars(paired(arms[arm], arms["none"])) for arm in SCALES}
            for bits, arms in found.items()
        },
        "greatest_to_least_scale": {
            arm: [round(float(mx.max(one) / mx.min(one)), 2) for one in of_layers]
            for arm, of_layers in attention.scales.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["demo"], help="folders, or demo")
    parser.add_argument("--corpora", type=Path, help="a folder with books_eval/*.txt")
    parser.add_argument("--documents", type=int, help="only so many")
    parser.add_argument("--length", type=int, default=640, help="tokens (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    runs = [run(name, args) for name in args.models]
    result = {
        "environment": report.environment() | {"backend": "composed", "blas": blas()},
        "length": args.length,
        "runs": runs,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for one in runs:
        for bits, arms in one["divergence"].items():
            plain = sum(arms["none"]) / len(arms["none"])
            print(f"{one['model']}, turbo{bits}: {plain:.5f} nats without scales")
            for arm, change in one["to_none"][bits].items():
                low, high = change["low"], change["high"]
                print(f"  {arm}: {change['mean']:+.5f} ({low:+.5f} to {high:+.5f})")
        print(one["greatest_to_least_scale"])


if __name__ == "__main__":
    main()
