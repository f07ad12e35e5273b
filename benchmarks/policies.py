"""Every policy on the demo model: facts recalled and perplexity after eviction, at equal budgets.

    python benchmarks/policies.py --corpora DIR --json benchmarks/results/policies.json

Documents are read side by side, as a batch of the caches themselves: every sequence and head of a
batch chooses its rows by itself, and a test compares the figures with documents read alone. Each is
read twice: token by token behind a prompt of 32 tokens, so that rows go at every step; and in
chunks of 128 tokens, as prompts are. Behind both the facts are asked, each on a copy of the cache.
The loss is that of the tokens predicted after the first eviction, of the first reading.

Takes minutes on two cores with a BLAS that is not the reference one (docs/limits.md).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import policy_documents
import policy_statistics as statistics
from mlx_lm.models.cache import make_prompt_cache

import mlx_h2o
from mlx_h2o import policies
from mlx_h2o.demo import report

PROMPT = 32
CHUNK = 128


def read(model: Any, caches: list[Any], tokens: mx.array, chunk: int) -> mx.array:
    """Feed tokens [B, T] in chunks; the last logits [B, V]."""
    logits: mx.array
    for start in range(0, tokens.shape[1], chunk):
        logits = model(tokens[:, start : start + chunk], cache=caches)[:, -1]
        mx.eval(logits, [cache.state for cache in caches])
    return logits


def losses(model: Any, caches: list[Any], tokens: mx.array) -> mx.array:
    """Read all but the last token one by one behind a prompt: losses [B, T - PROMPT], in nats."""
    logits = read(model, caches, tokens[:, :PROMPT], PROMPT)
    found = []
    for index in range(PROMPT, tokens.shape[1]):
        chosen = mx.take_along_axis(logits, tokens[:, index : index + 1], axis=1)[:, 0]
        found.append(mx.logsumexp(logits, axis=1) - chosen)
        if index + 1 < tokens.shape[1]:
            logits = model(tokens[:, index : index + 1], cache=caches)[:, -1]
        mx.eval(found[-1], logits)
    return mx.stack(found, axis=1)


def recall(model: Any, caches: list[Any], last: mx.array, documents: list[Any]) -> list[float]:
    """The share of its facts that greedy decoding answers behind each document.

    ``last`` [B, 1] is the last token of the documents, which the caches have not seen.
    """
    known = mx.zeros(len(documents))
    asked = len(documents[0].planted.questions)
    for fact in range(asked):
        questions = [document.planted.questions[fact] for document in documents]
        again = copy.deepcopy(caches)
        prompts = mx.array([question.prompt for question in questions])
        answers = mx.array([question.answer for question in questions])
        logits = read(model, again, mx.concatenate([last, prompts], axis=1), 1)
        right = mx.ones(len(documents), mx.bool_)
        for place in range(answers.shape[1]):
            right = right & (mx.argmax(logits, axis=1) == answers[:, place])
            logits = read(model, again, answers[:, place : place + 1], 1)
        known = known + right
    return [float(share) for share in (known / asked).tolist()]


def measure(model: Any, make: Any, tokens: mx.array, documents: list[Any]) -> dict[str, Any]:
    """Both readings of all documents with caches of one kind."""
    start = time.perf_counter()
    with mlx_h2o.routing(model):
        caches = make()
        found = losses(model, caches, tokens)
        by_token = recall(model, caches, tokens[:, -1:], documents)
        caches = make()
        read(model, caches, tokens[:, :-1], CHUNK)
        by_chunk = recall(model, caches, tokens[:, -1:], documents)
    return {
        "losses": found,
        "recall_by_token": by_token,
        "recall_by_chunk": by_chunk,
        "seconds": round(time.perf_counter() - start, 1),
    }


def mean_loss(found: mx.array, budget: int) -> list[float]:
    """Of each document, over the tokens predicted after the first eviction at this budget."""
    return [float(loss) for loss in found[:, budget + 1 - PROMPT :].mean(axis=1).tolist()]


def run(args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = mlx_h2o.load("demo")
    documents = policy_documents.documents(
        tokenizer, args.corpora, length=args.length, facts=args.facts, count=args.documents
    )
    tokens = mx.array([document.planted.tokens for document in documents])
    full = measure(model, lambda: make_prompt_cache(model), tokens, documents)
    full["loss"] = {str(b): mean_loss(full["losses"], b) for b in args.budgets}
    del full["losses"]
    result = {
        "environment": {**report.environment(), "blas": _blas()},
        "settings": {
            "documents": [document.source for document in documents],
            "length": args.length,
            "facts_per_document": args.facts,
            "budgets": args.budgets,
            "prompt": PROMPT,
            "chunk": CHUNK,
            "sink_size": 4,
            "recent": "half of the budget, less the sinks",
        },
        "full": full,
        "policies": {},
    }
    for policy in args.policies:
        result["policies"][policy] = {}
        for budget in args.budgets:

            def make(policy: str = policy, budget: int = budget) -> list[Any]:
                return mlx_h2o.make_prompt_cache(model, budget, policy=policy)

            found = measure(model, make, tokens, documents)
            found["loss"] = mean_loss(found.pop("losses"), budget)
            result["policies"][policy][str(budget)] = found
            print(policy, budget, found["seconds"], "s", flush=True)
            if args.json is not None:  # what is measured so far
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    result["decision"] = dataclasses.asdict(statistics.decide(result["policies"]))
    return result


def _blas() -> str:
    """The library that was preloaded, without its folder, or that MLX brings none."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    return Path(preloaded).name if preloaded else "MLX's own"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", type=Path, help="a folder with books_eval/*.txt")
    parser.add_argument("--documents", type=int, help="only so many")
    parser.add_argument("--length", type=int, default=640, help="tokens (default %(default)s)")
    parser.add_argument("--facts", type=int, default=4, help="per document (default %(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--policies", nargs="+", default=list(policies.names()))
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    result = run(args)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(statistics.table(result))
    print("default:", result["decision"]["default"])


if __name__ == "__main__":
    main()
