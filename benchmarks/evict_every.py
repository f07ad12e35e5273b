"""How many rows may leave together: recall and loss with groups, at the same peak of rows.

    python benchmarks/evict_every.py --corpora DIR --json benchmarks/results/evict_every.json

A cache never holds more than ``max_kv_size`` rows. Rows that leave in groups of ``evict_every``
cost one ranking per group, and leave up to ``evict_every - 1`` places empty until the next one: a
cache of 64 rows with groups of 16 holds 49 to 64. What that costs is measured here against groups
of one row. Documents, readings and figures are those of benchmarks/policies.py; differences are
paired by document.

The default, ``max_kv_size // 32``, is always among the groups. ``--models`` takes folders besides
"demo". What the result file already has of the same settings is not measured again.
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
from policy_readings import CHUNK, PROMPT, mean_loss, measure

import mlx_h2o
from mlx_h2o import H2OConfig
from mlx_h2o.evaluation.environment import blas, environment

ALONE = "1"
"""The size of group that the others are compared with, as the results name it."""
FIGURES = ("loss", "recall_by_token", "recall_by_chunk")


def run(args: argparse.Namespace) -> dict[str, Any]:
    settings = {
        "length": args.length,
        "facts_per_document": args.facts,
        "prompt": PROMPT,
        "chunk": CHUNK,
        "documents": args.documents,
    }
    result: dict[str, Any] = {
        "environment": {**environment(), "blas": blas()},
        "settings": settings,
        "models": _before(args.json, settings),
    }
    for policy in args.policies:
        for path in args.models:
            model, tokenizer = mlx_h2o.load(path)
            documents = policy_documents.documents(
                tokenizer, args.corpora, length=args.length, facts=args.facts, count=args.documents
            )
            place = result["models"].setdefault(Path(path).name, {})
            place["documents"] = [document.source for document in documents]
            runs = place.setdefault("policies", {}).setdefault(policy, {})
            for budget in args.budgets:
                _measure_groups(model, documents, policy, budget, args.groups, runs)
                print(Path(path).name, policy, budget, *verdicts(runs, [str(budget)]), flush=True)
                if args.json is not None:  # what is measured so far
                    args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _measure_groups(
    model: Any, documents: list[Any], policy: str, budget: int, groups: list[int], runs: Any
) -> None:
    tokens = mx.array([document.planted.tokens for document in documents])
    known = runs.setdefault(str(budget), {})
    default = H2OConfig(max_kv_size=budget).group
    for group in sorted({int(ALONE), default, *groups}):
        if str(group) in known:
            continue
        config = H2OConfig(max_kv_size=budget, policy=policy, evict_every=group)
        found = measure(
            model, lambda config=config: mlx_h2o.make_prompt_cache(model, config), tokens, documents
        )
        found["loss"] = mean_loss(found.pop("losses"), budget)
        known[str(group)] = found
    for group in sorted(known, key=int):
        known[group] = known.pop(group)


def _before(path: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found["models"] if found["settings"] == settings else {}


def difference(runs: Any, budgets: list[str], group: str, figure: str) -> statistics.Difference:
    """Groups against single rows, by document; the mean over the budgets."""
    ours, alone = (
        [float(mean) for mean in np.mean([runs[b][of][figure] for b in budgets], axis=0)]
        for of in (group, ALONE)
    )
    return statistics.paired(ours, alone)


def free(runs: Any, budget: str, group: str) -> bool:
    """Whether no interval of a difference shows a higher loss or fewer facts at this budget."""
    by_figure = {figure: difference(runs, [budget], group, figure) for figure in FIGURES}
    return by_figure["loss"].low <= 0 and all(by_figure[name].high >= 0 for name in FIGURES[1:])


def verdicts(runs: Any, budgets: list[str]) -> list[str]:
    """Of each size of group: its differences, averaged over the budgets."""
    lines = []
    for group in runs[budgets[0]]:
        found = {figure: difference(runs, budgets, group, figure) for figure in FIGURES}
        said = ", ".join(
            f"{name} {figure.mean:+.4f} [{figure.low:+.4f}, {figure.high:+.4f}]"
            for name, figure in found.items()
        )
        lines.append(f"\n  {group}: {said}")
    return lines


def table(result: dict[str, Any]) -> str:
    """Markdown: a line per model, policy and size of group, three columns per budget.

    A sign where the interval of the difference to single rows leaves out 0; nothing where that
    group was not measured at that budget.
    """
    places = [place["policies"] for place in result["models"].values()]
    measured = {budget for place in places for runs in place.values() for budget in runs}
    budgets = sorted(measured, key=int)
    head = ["model", "policy", "group"]
    for budget in budgets:
        head += [f"{budget}: loss", "by token", "by chunk"]
    lines = [head, ["---", "---", "---:", *["---:"] * (3 * len(budgets))]]
    for model, place in result["models"].items():
        for policy, runs in place["policies"].items():
            for group in sorted({group for run in runs.values() for group in run}, key=int):
                cells = [_cell(runs, budget, group, name) for budget in budgets for name in FIGURES]
                lines.append([model, f"`{policy}`", group, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(runs: Any, budget: str, group: str, figure: str) -> str:
    if group not in runs.get(budget, {}):
        return ""
    mean = float(np.mean(runs[budget][group][figure]))
    found = difference(runs, [budget], group, figure)
    sign = ("+" if found.mean > 0 else "-") if found.significant else ""
    return (f"{mean:.3f}" if figure == "loss" else f"{mean:.0%}") + sign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", type=Path, help="a folder with books_eval/*.txt")
    parser.add_argument("--models", nargs="+", default=["demo"], metavar="FOLDER")
    parser.add_argument("--documents", type=int, help="only so many")
    parser.add_argument("--length", type=int, default=640, help="tokens (default %(default)s)")
    parser.add_argument("--facts", type=int, default=4, help="per document (default %(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--policies", nargs="+", default=["keydiff", "h2o-ema", "window", "snapkv", "mix"]
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    result = run(args)
    print(table(result))
    for model, place in result["models"].items():
        for policy, runs in place["policies"].items():
            for budget, groups in runs.items():
                found = [group for group in groups if free(runs, budget, group)]
                print(f"{model}, {policy}, {budget} rows: no cost shown for {', '.join(found)}")


if __name__ == "__main__":
    main()
