"""Rows shared out over the layers by a profile, against the same rows for each layer.

    mlx_h2o calibrate --model demo --output demo.safetensors
    python benchmarks/shares.py --profile demo.safetensors --corpora DIR --json FILE

Three caches of as many rows: mlx_lm's kind of window, the profile's policy with one budget for all
layers, and the same with the rows of each layer that the profile gives it. Documents, readings and
figures are those of benchmarks/policies.py, without the text that profiles are made of. The loss is
that of the tokens after the common budget is full, the same ones for each cache.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import policy_documents
import policy_statistics as statistics
from mlx_lm.models.cache import make_prompt_cache
from policies import blas
from policy_readings import CHUNK, PROMPT, mean_loss, measure

import mlx_h2o
from mlx_h2o import H2OConfig, Profile
from mlx_h2o.demo import report

WINDOW, SHARED = "window", "by layer"
FIGURES = ("loss", "recall_by_token", "recall_by_chunk")


def settings(profile: Profile, budget: int) -> dict[str, list[H2OConfig]]:
    """Of each arm the settings of its layers: as many rows altogether."""
    config = H2OConfig(max_kv_size=budget, policy=profile.policy)
    layers = len(profile.loss)
    return {
        WINDOW: [H2OConfig(max_kv_size=budget, policy="window")] * layers,
        profile.policy: [config] * layers,
        f"{profile.policy}, {SHARED}": profile.share(budget * layers, config),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = mlx_h2o.load(args.model)
    profile = Profile.load(args.profile)
    found = policy_documents.documents(
        tokenizer, args.corpora, length=args.length, facts=args.facts
    )
    documents = found[1:][: args.documents]  # the first is the text of the profile
    tokens = mx.array([document.planted.tokens for document in documents])
    full = measure(model, lambda: make_prompt_cache(model), tokens, documents)
    losses = full.pop("losses")
    full["loss"] = {str(budget): mean_loss(losses, budget) for budget in args.budgets}
    result: dict[str, Any] = {
        "environment": {**report.environment(), "blas": blas()},
        "settings": {
            "model": Path(args.model).name,
            "documents": [document.source for document in documents],
            "length": args.length,
            "facts_per_document": args.facts,
            "budgets": args.budgets,
            "prompt": PROMPT,
            "chunk": CHUNK,
            "profile": profile.about,
        },
        "full": full,
        "policies": {},
    }
    for budget in args.budgets:
        for arm, layers in settings(profile, budget).items():
            found = measure(
                model,
                lambda layers=layers: mlx_h2o.make_prompt_cache(model, budgets=layers),
                tokens,
                documents,
            )
            found["loss"] = mean_loss(found.pop("losses"), budget)
            found["rows"] = [layer.max_kv_size for layer in layers]
            found["recent"] = [layer.recent_size for layer in layers]
            result["policies"].setdefault(arm, {})[str(budget)] = found
            print(arm, budget, found["rows"], found["seconds"], "s", flush=True)
            if args.json is not None:  # what is measured so far
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def differences(result: dict[str, Any]) -> dict[str, dict[str, statistics.Difference]]:
    """By budget and figure: rows by layer against the same policy with one budget for all."""
    _, policy, shared = result["policies"]
    runs = result["policies"]
    return {
        budget: {
            figure: statistics.paired(runs[shared][budget][figure], runs[policy][budget][figure])
            for figure in FIGURES
        }
        for budget in runs[policy]
    }


def lost(result: dict[str, Any], arm: str, budget: str) -> float:
    """What an arm loses above the full cache, as a part of what the window loses."""
    full = np.mean(result["full"]["loss"][budget])
    ours, window = (np.mean(result["policies"][a][budget]["loss"]) - full for a in (arm, WINDOW))
    return float(ours / window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="a folder, or %(default)s")
    parser.add_argument("--profile", type=Path, required=True, help="of mlx_h2o calibrate")
    parser.add_argument("--corpora", type=Path, help="a folder with books_eval/*.txt")
    parser.add_argument("--documents", type=int, help="only so many")
    parser.add_argument("--length", type=int, default=640, help="tokens (default %(default)s)")
    parser.add_argument("--facts", type=int, default=4, help="per document (default %(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    result = run(args)
    print(statistics.table(result))
    for budget, figures in differences(result).items():
        parts = [f"{arm} loses {lost(result, arm, budget):.2f}" for arm in result["policies"]]
        print(f"{budget} rows, of what the window loses: {', '.join(parts)}")
        for figure, found in figures.items():
            print(f"  {figure}: {found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]")


if __name__ == "__main__":
    main()
