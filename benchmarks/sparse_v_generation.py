"""Sparse V where a model writes: what it costs in quality, what it skips, and what it saves.

    python benchmarks/sparse_v_generation.py quality --models demo --documents 6 --seeds 1
        --steps 128 --texts BOOK.txt ... --json benchmarks/results/sparse_v_demo.json
    python benchmarks/sparse_v_generation.py speed --json benchmarks/results/sparse_v_speed.json

Rows are 8-bit affine, turbo3 and turbo8v3; thresholds are 0 and 1e-4 to 1e-8 (Turney 2026,
sections 3.2, 4.5 and 4.8). Chunks of a prompt never skip, so each text is read once for each
format, and every threshold goes on from a copy of that cache.

quality: texts of 2,048 tokens with facts. The last tokens are read one by one: their loss and
divergence from the full cache; then the facts are asked for. What is skipped is measured over 16
tokens at the end of each context.

speed: tokens/s with 1e-6 as a multiple of those with 0, in turns of some tokens each, in rotating
order; on the demo model at its longest context, and on random weights whose caches hold random
rows. Their logits are normal with a deviation of 1, where next to nothing is skipped, or of 4, by
a weight of the norm of queries, where most pairs are.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import mlx.core as mx
import numpy as np
from benchmark_models import parameters, random_model
from mlx_lm.models.cache import make_prompt_cache as stock_cache
from native_attention import spread
from sparse_v import THRESHOLDS

import mlx_h2o
from mlx_h2o import H2OConfig, demo
from mlx_h2o.demo import report
from mlx_h2o.evaluation.documents import windows
from mlx_h2o.evaluation.environment import blas
from mlx_h2o.evaluation.facts import PlantedText, draw, insert
from mlx_h2o.evaluation.reading import forced, read, recall
from mlx_h2o.evaluation.skipping import STEPS, skipped
from mlx_h2o.evaluation.statistics import paired

FORMATS: dict[str, dict[str, Any]] = {
    "8 bits": {"kv_bits": 8},
    "turbo3": {"kv_format": "turbo3"},
    "turbo8v3": {"kv_format": "turbo8v3"},
}
DEPTHS = (0.1, 0.5, 0.9)
CHUNK = 128


def settings(name: str, size: int, threshold: float = 0.0) -> H2OConfig:
    """An unbounded cache of this format, of rows of so many elements."""
    more: dict[str, Any] = FORMATS[name] | {"kv_group_size": min(64, size)}
    return H2OConfig(max_kv_size=None, policy="window", sparse_v=threshold, **more)


def with_threshold(caches: list[Any], threshold: float) -> list[Any]:
    """A copy of the caches that skips pairs below it."""
    copies = copy.deepcopy(caches)
    for one in copies:
        one.config = replace(one.config, sparse_v=threshold)
    return copies


def planted(tokenizer: Any, bodies: Sequence[Sequence[int]], seed: int) -> list[PlantedText]:
    """The texts, as long as they are, with a fact at each of the depths."""
    found = []
    for index, body in enumerate(bodies):
        facts = draw(tokenizer, "secret", len(DEPTHS), random.Random(f"{seed} {index}"))
        left = len(body) - sum(len(fact.tokens) for fact in facts)
        places = [int(depth * (left - 1)) for depth in DEPTHS]
        found.append(insert(tokenizer, body[:left], facts, places))
    return found


def quality(model: Any, texts: list[PlantedText], args: argparse.Namespace) -> dict[str, Any]:
    """By format and threshold the figures of each text; by context what each layer skips."""
    tokens = mx.array([text.tokens for text in texts])
    questions = [text.questions for text in texts]
    length = tokens.shape[1]
    first = length - args.steps - 1

    def written(caches: list[Any], **how: Any) -> tuple[Any, dict[str, list[float]]]:
        found = forced(model, caches, tokens[:, first:], first=1, chunk=1, **how)
        right = recall(model, caches, tokens[:, -1:], questions)
        figures = {"recall": mx.array(right).astype(mx.float32).mean(axis=0)}
        figures["loss"] = found.losses.mean(axis=1)
        if found.divergences is not None:
            figures["kld"] = found.divergences.mean(axis=1)
        return found, {name: values.tolist() for name, values in figures.items()}

    full = stock_cache(model)
    read(model, full, tokens[:, :first], CHUNK)
    reference, figures = written(full, keep=True)
    found: dict[str, Any] = {"full": figures}
    for name in FORMATS:
        caches = mlx_h2o.make_prompt_cache(model, settings(name, full[0].keys.shape[-1]))

        def go_to(end: int, caches: list[Any] = caches) -> None:
            read(model, caches, tokens[:, caches[0].offset : end], CHUNK)

        def shares(context: int, caches: list[Any] = caches) -> dict[str, list[float]]:
            go_to(context - STEPS - 1)
            last = tokens[:, context - STEPS - 1 : context]
            by_layer = {
                f"{tau:g}": skipped(model, with_threshold(caches, tau), last, 1).values()
                for tau in THRESHOLDS
            }
            return {tau: [mean(layer) for layer in layers] for tau, layers in by_layer.items()}

        with mlx_h2o.routing(model):
            skips = {str(context): shares(context) for context in args.contexts}
            go_to(first)
            thresholds = {
                f"{tau:g}": written(with_threshold(caches, tau), reference=reference)[1]
                for tau in (0.0, *THRESHOLDS)
            }
            skips[str(length)] = shares(length)
        found[name] = {"thresholds": thresholds, "skipped": skips}
    return found


def summed_up(found: dict[str, Any], seeds: int) -> dict[str, Any]:
    """For each format and threshold: the figures, and how much more is lost than at 0."""

    def by_text(figures: dict[str, list[float]], name: str) -> np.ndarray:
        return np.array(figures[name]).reshape(seeds, -1).T

    formats = {}
    for name in FORMATS:
        of = found[name]["thresholds"]
        formats[name] = {
            tau: {
                "loss": mean(one["loss"]),
                "kld": mean(one["kld"]),
                "recall": mean(one["recall"]),
                "loss_to_0": vars(paired(by_text(one, "loss"), by_text(of["0"], "loss"))),
                "kld_to_0": vars(paired(by_text(one, "kld"), by_text(of["0"], "kld"))),
            }
            for tau, one in of.items()
        }
    full = {name: mean(found["full"][name]) for name in ("loss", "recall")}
    return {"full": full, "formats": formats}


def qualities(args: argparse.Namespace) -> dict[str, Any]:
    if args.steps <= STEPS:
        raise ValueError(f"--steps is {args.steps}, expected more than {STEPS}")
    books = [(path.name, path.read_text(encoding="utf-8")) for path in args.texts]
    runs = []
    for name in args.models:
        model, tokenizer = mlx_h2o.load(name)
        bodies = windows(tokenizer, books, count=args.documents, length=args.length)
        texts = [
            text
            for seed in range(args.seeds)
            for text in planted(tokenizer, [body.tokens for body in bodies], seed)
        ]
        found = quality(model, texts, args)
        skips = {form: found[form]["skipped"] for form in FORMATS}
        summary = summed_up(found, args.seeds)
        runs.append({"model": Path(name).name, **summary, "skipped_by_layer": skips})
        _say(runs[-1])
    numbers = {name: getattr(args, name) for name in ("length", "steps", "documents", "seeds")}
    return {**numbers, "texts": [name for name, _ in books], "runs": runs}


def _say(run: dict[str, Any]) -> None:
    print(f"{run['model']}: full {run['full']}")
    for form, thresholds in run["formats"].items():
        for tau, one in thresholds.items():
            more = one["loss_to_0"]
            shares = [
                f"{min(layers[tau]):.1%} / {median(layers[tau]):.1%} / {max(layers[tau]):.1%}"
                for layers in run["skipped_by_layer"][form].values()
                if tau in layers
            ]
            print(
                f"  {form}, {tau}: loss {more['mean']:+.1e} ({more['low']:+.1e} to "
                f"{more['high']:+.1e}), kld {one['kld']:.5f}, recall {one['recall']:.1%}; "
                f"skipped {', '.join(shares)}"
            )


def filled(model: Any, rows: int, name: str) -> list[Any]:
    """Caches that hold so many random rows, as normal as those behind a norm are."""
    caches = mlx_h2o.make_prompt_cache(model, settings(name, model.args.head_dim))
    shape = (1, model.args.num_key_value_heads, rows, model.args.head_dim)
    for cache in caches:
        cache.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
        mx.eval(cache.state)
    return caches


def read_text(rows: int, name: str) -> tuple[Any, list[Any]]:
    """The demo model, and caches that hold so many tokens of its text."""
    model, tokenizer = mlx_h2o.load("demo")
    text = tokenizer.encode(demo.text())
    tokens = mx.array([(text * (rows // len(text) + 1))[:rows]])
    caches = mlx_h2o.make_prompt_cache(model, settings(name, model.args.head_dim))
    with mlx_h2o.routing(model):
        read(model, caches, tokens, CHUNK)
    return model, caches


def turns(model: Any, caches: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second without sparse V and with it, their ratio, and what is skipped."""
    arms = {tau: with_threshold(caches, tau) for tau in (0.0, args.threshold)}
    seconds: dict[float, list[float]] = {tau: [] for tau in arms}

    def turn(tau: float) -> float:
        token = mx.array([[1]])
        start = time.perf_counter()
        for _ in range(args.tokens):
            token = mx.argmax(model(token, cache=arms[tau])[:, -1:], axis=-1)
            mx.eval(token)
        return (time.perf_counter() - start) / args.tokens

    with mlx_h2o.routing(model):
        shares = skipped(
            model, with_threshold(caches, args.threshold), mx.ones((1, STEPS + 1), mx.int32), 1
        )
        for repeat in range(args.repeats + 1):
            for place in range(2):
                tau = tuple(arms)[(repeat + place) % 2]
                took = turn(tau)
                if repeat:  # the first turns warm up
                    seconds[tau].append(took)
    off, on = seconds[0.0], seconds[args.threshold]
    return {
        "tokens_per_second": {"off": 1 / median(off), "on": 1 / median(on)},
        "speed_with_to_without": spread([a / b for a, b in zip(off, on, strict=True)]),
        "skipped_by_layer": [mean(layer) for layer in shares.values()],
    }


def speeds(args: argparse.Namespace) -> dict[str, Any]:
    runs = []

    def measured(by: Any, caches: list[Any], **of: Any) -> None:
        found = {**of, "parameters": parameters(by)}
        runs.append(found | turns(by, caches, args))
        ratio = runs[-1]["speed_with_to_without"]
        print(f"{found}: {ratio}, skipped {median(runs[-1]['skipped_by_layer']):.1%}")

    for name in FORMATS:
        rows = args.demo_rows - (args.repeats + 1) * args.tokens
        model, caches = read_text(rows, name)
        measured(model, caches, model="demo", format=name, rows=args.demo_rows)
    for deviation in (1, 4):
        model = random_model()
        for layer in model.layers:
            layer.self_attn.q_norm.weight = layer.self_attn.q_norm.weight * deviation
        for rows in args.rows:
            for name in FORMATS:
                caches = filled(model, rows, name)
                of = {"deviation": deviation, "format": name, "rows": rows}
                measured(model, caches, model="random", **of)
    numbers = {name: getattr(args, name) for name in ("threshold", "repeats", "tokens")}
    return {**numbers, "threads": mlx_h2o.threads(), "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parsers = parser.add_subparsers(required=True)
    one = parsers.add_parser("quality")
    one.set_defaults(run=qualities)
    one.add_argument("--models", nargs="+", default=["demo"], help="folders, or demo")
    one.add_argument("--texts", nargs="+", type=Path, required=True)
    one.add_argument("--documents", type=int, default=4)
    one.add_argument("--length", type=int, default=2048, help="tokens (default %(default)s)")
    one.add_argument("--steps", type=int, default=256, help="tokens that are read one by one")
    one.add_argument("--contexts", type=int, nargs="*", default=[512, 1024])
    one.add_argument("--seeds", type=int, default=3, help="of facts")
    two = parsers.add_parser("speed")
    two.set_defaults(run=speeds)
    two.add_argument("--demo-rows", type=int, default=2048)
    two.add_argument("--rows", type=int, nargs="+", default=[8192, 16384, 32768])
    two.add_argument("--threshold", type=float, default=1e-6)
    two.add_argument("--repeats", type=int, default=9)
    two.add_argument("--tokens", type=int, default=8, help="of a turn")
    for each in (one, two):
        each.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    result = {"environment": report.environment() | {"blas": blas()}, **args.run(args)}
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
