"""Whether the caches still lose as little on a real model: `python benchmarks/real_check.py`.

SmolLM2 (`nox -s yardsticks`) reads two passages in one batch, 256 tokens at once, then eight, then
one, with the full cache, mlx_lm's 8-bit cache, and those of `--max-kv-bytes` for a quarter and an
eighth of float16's bytes. It also answers questions on facts planted in them, and fails if heads
get the wrong rows. ``--write`` writes the expected results, benchmarks/results/real_check.json.
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
from mlx_lm.models import llama
from mlx_lm.models.cache import CacheList, QuantizedKVCache
from mlx_lm.models.cache import make_prompt_cache as stock_cache

import mlx_h2o
from mlx_h2o import demo
from mlx_h2o.evaluation import reading
from mlx_h2o.evaluation.arms import Sizes
from mlx_h2o.evaluation.environment import environment
from mlx_h2o.evaluation.questions import Settings
from mlx_h2o.evaluation.tasks import cases
from mlx_h2o.lm.routing import routing_for

COMMITTED = Path(__file__).parent / "results" / "real_check.json"
MODEL = "smollm2-135m-instruct"

TOKENS, PASSAGES = 640, 2
PIECES = ((0, 512, 256, 8), (511, TOKENS, 1, 1))
"""Start, end, first chunk and size of later chunks; the last token is only predicted."""

PARTS = {"quarter": 4, "eighth": 8}
TOLERANCE = 0.01
"""Nats: processors round differently, which may only decide ties between rows."""
RECALLED = 0.1
"""The tolerance for the share of right tokens in answers."""


def passages(tokenizer: Any) -> mx.array:
    """[B, T] tokens of the text in the package."""
    tokens = tokenizer.encode(demo.text(), add_special_tokens=False)
    return mx.array(tokens[: PASSAGES * TOKENS]).reshape(PASSAGES, TOKENS)


def losses(model: Any, tokens: mx.array, **more: Mapping[str, Any]) -> dict[str, float]:
    """Nats per token after the first chunk, by cache; ``more``: further settings of an eighth."""
    lists = {
        "full": stock_cache(model),
        "stock 8 bits": [QuantizedKVCache(64, 8) for _ in stock_cache(model)],
    }
    lists |= {name: bounded(model, part) for name, part in PARTS.items()}
    lists |= {name: bounded(model, PARTS["eighth"], **given) for name, given in more.items()}
    caches = [Beside(*layer) for layer in zip(*lists.values(), strict=True)]
    tokens = mx.concatenate([tokens] * len(lists))
    with routing_for(model, caches):
        read = functools.partial(reading.forced, model, caches)
        parts = [read(tokens[:, a:b], first=n, step=step).losses for a, b, n, step in PIECES]
    found = mx.concatenate(parts, axis=1).reshape(len(lists), -1).mean(axis=1)
    return dict(zip(lists, found.tolist(), strict=True))


def recalled(model: Any, tokenizer: Any, make: Callable[[], list[Any]]) -> float:
    """The share of the tokens of answers that are right."""
    settings = Settings(documents=PASSAGES, lengths=(TOKENS,))
    (case,) = cases(model, tokenizer, [("demo", demo.text())], ("facts",), settings)
    right = case.measure(make, lambda done, total: None)["tokens"]
    return sum(right) / len(right)


def bounded(model: Any, part: int, **settings: Any) -> list[Any]:
    """The caches of ``--max-kv-bytes`` for this part of float16's bytes, with further settings."""
    limit = Sizes(model).full(TOKENS) // part
    return mlx_h2o.make_prompt_cache(model, max_kv_bytes=limit, length=TOKENS, **settings)


class Beside(CacheList):
    """Several caches of a layer, each for its part of a batch: a step mostly reads weights, so it
    takes little longer for twelve sequences than for two."""

    offset = property(lambda self: self.caches[0].offset)
    update_and_fetch = staticmethod(lambda *rows: rows)  # each cache takes its own below

    def make_mask(self, *given: Any, **named: Any) -> list[Any]:
        return [cache.make_mask(*given, **named) for cache in self.caches]

    def attend_for_probe(self, _: Any, *rows: Any, mask: list[Any], **given: Any) -> mx.array:
        attend = functools.partial(llama.scaled_dot_product_attention, **given)
        parts = (mx.split(one, len(self.caches)) for one in rows)
        outs = [
            attend(queries, *cache.update_and_fetch(keys, values), cache, mask=own)
            for cache, own, queries, keys, values in zip(self.caches, mask, *parts, strict=True)
        ]
        return mx.concatenate(outs)


def beyond(found: Mapping[str, float], expected: Mapping[str, float]) -> list[str]:
    """One line for each figure beyond its tolerance: the loss of the full cache, what other caches
    lose in addition, and the share of recall."""
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
