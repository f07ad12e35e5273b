"""A budget for each layer, made of a profile, against the same rows shared equally.

    python benchmarks/budgets.py --corpora DIR --json benchmarks/results/budgets.json

Three ways to spend the same rows over all layers: one budget for each layer (uniform), the same
with heavy and recent rows split by the concentration of the layer (``Profile.by_concentration``),
and one budget for all layers shared out by their entropy (``Profile.by_entropy``). The profile is
of the embedded text, which is not among the documents. Documents, readings and figures are those
of benchmarks/policies.py. The loss is that of the tokens predicted after the uniform budget is
full, the same tokens for each way.

What the result file already has of the same settings is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import policy_documents
import policy_statistics as statistics
from policies import blas
from policy_readings import CHUNK, PROMPT, mean_loss, measure

import mlx_h2o
from mlx_h2o import H2OConfig, demo
from mlx_h2o.demo import report
from mlx_h2o.lm.profiling import Profile

UNIFORM = "uniform"
WAYS = (UNIFORM, "by concentration", "by entropy")
FIGURES = ("loss", "recall_by_token", "recall_by_chunk")


def configs(way: str, profile: Profile, config: H2OConfig) -> list[H2OConfig]:
    """The settings of each layer."""
    if way == "by concentration":
        return profile.by_concentration(config)
    if way == "by entropy":
        return profile.by_entropy(config)
    return [config] * len(profile.layers)


def run(args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = mlx_h2o.load("demo")
    found = policy_documents.documents(
        tokenizer, args.corpora, length=args.length, facts=args.facts
    )
    documents = found[1:][: args.documents]  # the first is the text of the profile
    text = tokenizer.encode(demo.text())[: args.length]
    profile = mlx_h2o.profile(model, [text])
    result: dict[str, Any] = {
        "environment": {**report.environment(), "blas": blas()},
        "settings": {
            "documents": [document.source for document in documents],
            "length": args.length,
            "facts_per_document": args.facts,
            "budgets": args.budgets,
            "prompt": PROMPT,
            "chunk": CHUNK,
        },
        "layers": [vars(layer) for layer in profile.layers],
        "policies": {},
    }
    before = _before(args.json, result["settings"])
    tokens = mx.array([document.planted.tokens for document in documents])
    for policy in args.policies:
        for way in WAYS:
            for budget in args.budgets:
                place = result["policies"].setdefault(policy, {}).setdefault(way, {})
                known = before.get(policy, {}).get(way, {}).get(str(budget))
                place[str(budget)] = known or _measured(
                    model, configs(way, profile, H2OConfig(max_kv_size=budget, policy=policy)),
                    tokens, documents, budget,
                )  # fmt: skip
                print(policy, way, budget, place[str(budget)]["seconds"], "s", flush=True)
                if args.json is not None:  # what is measured so far
                    args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _measured(
    model: Any, layers: list[H2OConfig], tokens: mx.array, documents: list[Any], budget: int
) -> dict[str, Any]:
    found = measure(
        model, lambda: mlx_h2o.make_prompt_cache(model, budgets=layers), tokens, documents
    )
    found["loss"] = mean_loss(found.pop("losses"), budget)
    found["rows"] = [layer.max_kv_size for layer in layers]
    found["heavy"] = [layer.heavy_size for layer in layers]
    return found


def _before(path: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())
    return found["policies"] if found["settings"] == settings else {}


def differences(result: dict[str, Any]) -> dict[str, dict[str, dict[str, statistics.Difference]]]:
    """By policy, way and figure: the difference to uniform, averaged over the budgets."""
    found: dict[str, Any] = {}
    for policy, ways in result["policies"].items():
        found[policy] = {
            way: {
                figure: statistics.paired(_averaged(runs, figure), _averaged(ways[UNIFORM], figure))
                for figure in FIGURES
            }
            for way, runs in ways.items()
            if way != UNIFORM
        }
    return found


def _averaged(runs: dict[str, Any], figure: str) -> list[float]:
    return [float(mean) for mean in np.mean([run[figure] for run in runs.values()], axis=0)]


def table(result: dict[str, Any]) -> str:
    """Markdown: a line per policy and way, three columns per budget.

    A sign where the interval of the difference to uniform leaves out 0.
    """
    budgets = [str(budget) for budget in result["settings"]["budgets"]]
    lines = [["policy", "rows", *_columns(budgets)]]
    lines.append(["---", "---", *["---:"] * (3 * len(budgets))])
    for policy, ways in result["policies"].items():
        for way, runs in ways.items():
            cells = [cell for budget in budgets for cell in _cells(runs, ways[UNIFORM], budget)]
            lines.append([f"`{policy}`", way, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _columns(budgets: list[str]) -> list[str]:
    return [
        text for budget in budgets for text in (f"{budget}: perplexity", "by token", "by chunk")
    ]


def _cells(runs: dict[str, Any], uniform: dict[str, Any], budget: str) -> list[str]:
    cells = []
    for figure in FIGURES:
        ours, theirs = runs[budget][figure], uniform[budget][figure]
        mean = float(np.mean(ours))
        shown = f"{math.exp(mean):.2f}" if figure == "loss" else f"{mean:.0%}"
        found = statistics.paired(ours, theirs)
        cells.append(shown + (("+" if found.mean > 0 else "-") if found.significant else ""))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", type=Path, help="a folder with books_eval/*.txt")
    parser.add_argument("--documents", type=int, help="only so many")
    parser.add_argument("--length", type=int, default=640, help="tokens (default %(default)s)")
    parser.add_argument("--facts", type=int, default=4, help="per document (default %(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--policies", nargs="+", default=["keydiff", "h2o"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    result = run(args)
    print(table(result))
    for policy, ways in differences(result).items():
        for way, figures in ways.items():
            for figure, found in figures.items():
                print(f"{policy}, {way}, {figure}: {found.mean:+.4f} [{found.low:+.4f}, "
                      f"{found.high:+.4f}]")  # fmt: skip


if __name__ == "__main__":
    main()
