"""Every policy on a small model: facts recalled and perplexity after eviction, at equal budgets.

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
import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import policy_documents
import policy_statistics as statistics
from mlx_lm.models.cache import make_prompt_cache
from policy_readings import CHUNK, PROMPT, mean_loss, measure

import mlx_h2o
from mlx_h2o import policies
from mlx_h2o.evaluation.environment import blas, environment


def run(args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = mlx_h2o.load(args.model)
    documents = policy_documents.documents(
        tokenizer, args.corpora, length=args.length, facts=args.facts, count=args.documents
    )
    tokens = mx.array([document.planted.tokens for document in documents])
    full = measure(model, lambda: make_prompt_cache(model), tokens, documents)
    full["loss"] = {str(b): mean_loss(full["losses"], b) for b in args.budgets}
    del full["losses"]
    result = {
        "environment": {**environment(), "blas": blas()},
        "settings": {
            "model": Path(args.model).name,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="a folder, or %(default)s")
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
