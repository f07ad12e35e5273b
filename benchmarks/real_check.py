"""Whether the caches lose on a real model what they lost before: `python benchmarks/real_check.py`.

SmolLM2 (`nox -s yardsticks`) reads two passages, 256 tokens at once, then in eights, then one by
one, with the full cache, mlx_lm's of 8 bits, and what `--max-kv-bytes` makes of a quarter and of an
eighth of float16's bytes; and answers questions on facts planted in them, which rows for the wrong
heads lose. Both are compared with benchmarks/results/real_check.json; ``--write`` writes that file.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.models.cache import make_prompt_cache as stock_cache

import mlx_h2o
from mlx_h2o import demo
from mlx_h2o.evaluation import reading
from mlx_h2o.evaluation.arms import Sizes
from mlx_h2o.evaluation.environment import environment
from mlx_h2o.evaluation.questions import Settings
from mlx_h2o.evaluation.tasks import cases

__all__ = ["COMMITTED", "PARTS", "TOLERANCE", "beyond", "loss", "losses", "passages", "recalled"]

COMMITTED = Path(__file__).parent / "results" / "real_check.json"
MODEL = "smollm2-135m-instruct"

TOKENS, PASSAGES = 640, 2
PIECES = ((0, 256, 256), (256, 512, 8), (512, TOKENS, 1))
"""From where to where tokens are read so many at a time."""

PARTS = {"quarter": 4, "eighth": 8}
TOLERANCE = 0.01
"""Nats: other processors round otherwise, which decides ties between rows, no more."""
RECALLED = 0.1
"""The same of the tokens of answers."""


def passages(tokenizer: Any) -> mx.array:
    """[B, T] tokens of the text in the package."""
    tokens = tokenizer.encode(demo.text(), add_special_tokens=False)
    return mx.array(tokens[: PASSAGES * TOKENS]).reshape(PASSAGES, TOKENS)


def losses(model: Any, tokens: mx.array) -> dict[str, float]:
    """Nats per token with each cache, after the first piece."""
    makers: dict[str, Callable[[], list[Any]]] = {
        "full": lambda: stock_cache(model),
        "stock 8 bits": lambda: [QuantizedKVCache(64, 8) for _ in stock_cache(model)],
    }
    for name, part in PARTS.items():
        makers[name] = lambda part=part: bounded(model, part)
    return {name: loss(model, make(), tokens) for name, make in makers.items()}


def recalled(model: Any, tokenizer: Any, make: Callable[[], list[Any]]) -> float:
    """The share of the tokens of answers that are right."""
    settings = Settings(documents=PASSAGES, lengths=(TOKENS,))
    (case,) = cases(model, tokenizer, [("demo", demo.text())], ("facts",), settings)
    right = case.measure(make, reading.silent)["tokens"]
    return sum(right) / len(right)


def bounded(model: Any, part: int, **settings: Any) -> list[Any]:
    """What ``--max-kv-bytes`` makes of this part of float16's bytes, with further settings."""
    limit = Sizes(model).full(TOKENS) // part
    return mlx_h2o.make_prompt_cache(model, max_kv_bytes=limit, length=TOKENS, **settings)


def loss(model: Any, caches: list[Any], tokens: mx.array) -> float:
    """Nats per token behind the first piece of tokens [B, T]."""
    found = []
    with reading.routed(model, caches):
        last = None
        for start, end, step in PIECES:
            for place in range(start, end, step):
                piece = tokens[:, place : place + step]
                logits = model(piece, cache=caches).astype(mx.float32)
                log_weights = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
                if last is not None:
                    before = mx.concatenate([last, log_weights[:, :-1]], axis=1)
                    found.append(-mx.take_along_axis(before, piece[..., None], axis=2).sum())
                last = log_weights[:, -1:]
                mx.eval(last, found[-1:], [cache.state for cache in caches])
    predicted = tokens.shape[0] * (tokens.shape[1] - PIECES[0][1])
    return float(sum(each.item() for each in found)) / predicted


def beyond(found: Mapping[str, float], expected: Mapping[str, float]) -> list[str]:
    """What differs by more than the tolerance, as a line each: of the full cache the loss, of the
    others what they lose more; and of recall the share."""
    lines = []
    for name in found:
        recall = name.startswith("recall")
        own, theirs = (
            figures[name] - (0 if recall or name == "full" else figures["full"])
            for figures in (found, expected)
        )
        if abs(own - theirs) > (RECALLED if recall else TOLERANCE):
            lines.append(f"{name}: {own:.4f}, expected {theirs:.4f}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help=f"the folder of {MODEL}")
    parser.add_argument("--write", action="store_true", help="write the figures to compare with")
    given = parser.parse_args()
    model, tokenizer = mlx_h2o.load(given.model)
    found = losses(model, passages(tokenizer))
    for name, nats in found.items():
        print(f"{name:14} {nats:.4f} nats, {nats - found['full']:+.4f}")
    eighth = functools.partial(bounded, model, PARTS["eighth"])
    for name, make in (("full", lambda: stock_cache(model)), ("eighth", eighth)):
        found[f"recall, {name}"] = share = recalled(model, tokenizer, make)
        print(f"{f'recall, {name}':14} {share:.3f} of the answers' tokens")
    if given.write:
        written = {"environment": environment(), "model": MODEL, "losses": found}
        COMMITTED.write_text(json.dumps(written, indent=1) + "\n")
        return 0
    wrong = beyond(found, json.loads(COMMITTED.read_text())["losses"])
    print("\n".join(wrong), file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
