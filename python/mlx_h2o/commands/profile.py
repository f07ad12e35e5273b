"""`mlx_h2o profile`: how the layers of a model attend, and a budget for each, as a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..lm.generate import load
from ..lm.profiling import profile
from .options import add_cache_flags, config_of


def run(arguments: Sequence[str]) -> int:
    """Profile a model on a text, print a line per layer, write the file; the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    config = config_of(parser, args)
    try:
        model, tokenizer = load(args.model)
        text = args.text.read_text(encoding="utf-8")
        tokens = tokenizer.encode(text, add_special_tokens=False)[: args.tokens]
        found = profile(model, [tokens])
        by = found.by_entropy if args.by == "entropy" else found.by_concentration
        budgets = by(config)
        found.save(args.json, budgets)
    except (OSError, ValueError) as error:
        print(f"mlx_h2o profile: {error}", file=sys.stderr)
        return 1
    print("layer  entropy  top-32 share  variance  rows  heavy")
    for index, (layer, budget) in enumerate(zip(found.layers, budgets, strict=True)):
        print(
            f"{index:5}  {layer.entropy:7.3f}  {layer.concentration:12.3f}  "
            f"{layer.variance:8.3f}  {budget.max_kv_size:4}  {budget.heavy_size:5}"
        )
    print(f"{found.steps} steps; mlx_h2o generate --budgets {args.json} uses these budgets.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_h2o profile",
        description="Entropy, concentration and variance of the attention of each layer over a "
        "text, and a budget for each layer made of them.",
    )
    parser.add_argument("--model", required=True, help='a directory, a name on the hub, or "demo"')
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--tokens", type=int, default=512, help="of the text (default 512)")
    parser.add_argument(
        "--by",
        choices=["entropy", "concentration"],
        default="entropy",
        help="entropy: one budget for all layers, shared out; concentration: the split of heavy "
        "and recent rows of equal budgets (default: %(default)s)",
    )
    add_cache_flags(parser, only=("max_kv_size", "sink_size"))
    return parser
