"""Perplexity with rows of several precisions, at one budget, on the demo model.

    python benchmarks/mixed_precision.py --corpora DIR --json FILE

The question of AtomGradient 2026, table 10: what do 8 bits, 8 and 4 bits by rank, and 4 bits cost
beside an evicting cache of dense rows? Documents are read token by token behind a prompt of 32
tokens; the loss is that of the tokens predicted after the first eviction. Every arm evicts by the
same policy and reads the same documents, so differences between arms are of paired losses.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import policy_documents
from cache_bytes import ARMS
from mlx_lm.models.cache import make_prompt_cache as stock

import mlx_h2o
from mlx_h2o import evaluate
from mlx_h2o.demo import report

PROMPT = 32
FULL = "full cache"


def losses_of(model: Any, name: str, budget: int, tokens: list[int]) -> list[float]:
    """Losses of the tokens that are predicted after the first eviction."""
    if name == FULL:
        caches = stock(model)
    else:
        caches = mlx_h2o.make_prompt_cache(model, budget, policy="h2o-ema", **ARMS[name][0])
    run = evaluate.teacher_forced(model, caches, tokens, first=PROMPT)
    return list(run.losses[budget + 1 - PROMPT :])


def compared(losses: dict[str, list[list[float]]]) -> dict[str, dict[str, float]]:
    """Perplexities; and the mean difference to the dense rows, in percent of perplexity.

    The interval is twice the standard error of the documents' mean differences.
    """
    found = {}
    for name, of_documents in losses.items():
        means = [sum(one) / len(one) for one in of_documents]
        dense = [sum(one) / len(one) for one in losses["dense"]]
        full = [sum(one) / len(one) for one in losses[FULL]]
        differences = [a - b for a, b in zip(means, dense, strict=True)]
        center = sum(differences) / len(differences)
        spread = sum((one - center) ** 2 for one in differences)
        error = math.sqrt(spread / max(1, len(differences) - 1) / len(differences))
        found[name] = {
            "perplexity": math.exp(sum(means) / len(means)),
            "percent_to_full": 100 * math.expm1(sum(means) / len(means) - sum(full) / len(full)),
            "percent_to_dense": 100 * math.expm1(center),
            "percent_to_dense_from": 100 * math.expm1(center - 2 * error),
            "percent_to_dense_to": 100 * math.expm1(center + 2 * error),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpora", type=Path, help="a folder with books_eval/*.txt")
    parser.add_argument("--documents", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--length", type=int, default=600, help="tokens (default: %(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 128])
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    model, tokenizer = mlx_h2o.load("demo")
    documents = policy_documents.documents(
        tokenizer, args.corpora, length=args.length, facts=0, count=args.documents
    )
    results = {}
    for budget in args.budgets:
        losses = {
            name: [losses_of(model, name, budget, list(d.planted.tokens)) for d in documents]
            for name in (FULL, *ARMS)
        }
        results[str(budget)] = compared(losses)
        print(f"budget {budget}, {len(documents)} documents of {args.length} tokens")
        for name, one in results[str(budget)].items():
            print(
                f"  {name:40} {one['perplexity']:7.2f}  {one['percent_to_full']:+6.2f} % to full, "
                f"{one['percent_to_dense']:+6.2f} % to dense "
                f"({one['percent_to_dense_from']:+.2f} to {one['percent_to_dense_to']:+.2f})",
                flush=True,
            )
    if args.json is not None:
        content = {
            "environment": report.environment(),
            "settings": {"policy": "h2o-ema", "prompt": PROMPT, "length": args.length},
            "documents": [document.source for document in documents],
            "budgets": results,
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
