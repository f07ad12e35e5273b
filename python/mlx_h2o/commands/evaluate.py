"""`mlx_h2o evaluate`: what bounded caches cost on a text of one's own, at equal budgets."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import evaluate, policies
from ..config import H2OConfig
from ..lm.generate import load, make_prompt_cache
from ..lm.profile import Profile
from .options import add_cache_flags, settings_of


def run(arguments: Sequence[str]) -> int:
    """Run it with the command line's arguments; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    config, budgets, profile, _ = settings_of(parser, args)
    try:
        text = Path(args.text).read_text(encoding="utf-8") if args.text != "-" else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text: {error}")
    model, tokenizer = load(args.model)
    tokens = tokenizer.encode(text)[: args.length]
    first = config.max_kv_size or args.chunk
    if len(tokens) < first + 2:
        flag = "--max-kv-size" if config.max_kv_size else "--chunk"
        parser.error(
            f"--text has {len(tokens)} tokens, expected more than {flag} = {first}: otherwise "
            "nothing is evicted, or predicted"
        )
    try:
        found = [
            _measure(name, model, make(), tokens, first, args.chunk)
            for name, make in _arms(
                model, config, budgets, profile, args.policies or [config.policy]
            )
        ]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    Console().print(_table(found, len(tokens), config))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_h2o evaluate",
        description="Read a text with the full cache, with mlx_lm's RotatingKVCache and with "
        "caches that evict, token by token behind a prompt of the budget's length, and compare "
        "how well each predicts it.",
    )
    parser.add_argument("--model", required=True, help="a directory, a name on the hub, or 'demo'")
    parser.add_argument("--text", required=True, help="a text file, or '-' for standard input")
    parser.add_argument(
        "--length", type=int, default=2048, help="tokens of it, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--chunk", type=int, default=128, help="tokens per prefill chunk (default: %(default)s)"
    )
    parser.add_argument(
        "--policies", nargs="+", choices=policies.names(), help="compare these, not only --policy"
    )
    parser.add_argument("--json", type=Path, help="write the figures, unrounded, to this file")
    add_cache_flags(parser)
    return parser


def _arms(
    model: Any,
    config: H2OConfig,
    budgets: str | None,
    profile: Profile | None,
    names: Sequence[str],
) -> list[tuple[str, Any]]:
    """A name, and what makes the caches; the full cache first, as the others are compared to it."""
    from mlx_lm.models.cache import make_prompt_cache as stock

    def ours(policy: str) -> Any:
        return lambda: make_prompt_cache(model, replace(config, policy=policy), budgets=budgets)

    arms = [("full cache", lambda: stock(model))]
    # A model with make_cache ignores the size; there is none without a budget.
    if config.max_kv_size is not None and not hasattr(model, "make_cache"):
        arms.append(("rotating", lambda: stock(model, config.max_kv_size)))
    arms += [(name, ours(name)) for name in names]
    if profile is not None:
        shared = lambda: make_prompt_cache(model, config, profile=profile)  # noqa: E731
        arms.append((f"{config.policy}, by layer", shared))
    return arms


def _measure(
    name: str, model: Any, cache: list[Any], tokens: Sequence[int], first: int, chunk: int
) -> dict[str, Any]:
    with evaluate.peak_memory() as peak:
        forced = evaluate.teacher_forced(model, cache, tokens, first=first, chunk=chunk)
    return {
        "cache": name,
        "perplexity": evaluate.perplexity(forced),
        "top1": list(forced.top1),
        "losses": list(forced.losses),
        "kv_bytes": evaluate.kv_bytes(cache),
        "peak_bytes": peak.bytes,
    }


def _table(found: Sequence[dict[str, Any]], length: int, config: H2OConfig) -> Table:
    full = found[0]["top1"]
    title = f"{length} tokens, budget {config.max_kv_size or 'of any number of'} rows"
    table = Table(title=title, title_justify="left")
    for column in ("cache", "perplexity", "same top token", "KV cache, MB", "peak, MB"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for arm in found:
        same = sum(a == b for a, b in zip(arm["top1"], full, strict=True)) / len(full)
        table.add_row(
            arm["cache"],
            f"{arm['perplexity']:.2f}",
            f"{same:.1%}",
            f"{arm['kv_bytes'] / 1e6:.2f}",
            f"{arm['peak_bytes'] / 1e6:.1f}",
        )
    return table
