"""`mlx_h2o chat`, `server` and `benchmark`: mlx_lm's own, with caches that evict."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ..lm.hosting import hosting
from .options import add_eviction, add_quantisation, config_of

__all__ = ["run"]


def run(command: str, arguments: Sequence[str]) -> int:
    """Run mlx_lm's command of this name with the arguments that are not ours; the exit status."""
    parser = _parser(command)
    args, others = parser.parse_known_args(arguments)
    drafted = 0
    if args.draft_model is not None:
        drafted = args.num_draft_tokens
        others += ["--draft-model", args.draft_model, "--num-draft-tokens", str(drafted)]
    config = config_of(parser, args, speculative=drafted)
    if config.dense_rows and command != "chat":
        parser.error("--light-bits and --dense-size are not available in batches")
    if "-h" in others or "--help" in others:
        print(parser.format_help())
        print(f"Options of mlx_lm's own {command}:\n")
    main = importlib.import_module(f"mlx_lm.{command}").main
    before = sys.argv
    sys.argv = [f"mlx_h2o {command}", *others]
    try:
        with hosting(config):
            main()
    except ValueError as error:  # a model that cannot be served, or without a chat template
        print(f"mlx_h2o {command}: {error}", file=sys.stderr)
        return 1
    finally:
        sys.argv = before
    return 0


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"mlx_h2o {command}",
        description=f"mlx_lm's {command} with KV caches that evict rows.",
        add_help=False,
        allow_abbrev=False,  # what is not ours is mlx_lm's
    )
    add_quantisation(parser)
    add_eviction(parser)
    drafts = parser.add_argument_group("speculative decoding (server)")
    drafts.add_argument("--draft-model", help="a model that proposes tokens")
    drafts.add_argument(
        "--num-draft-tokens", type=int, default=3, help="tokens it proposes (default: %(default)s)"
    )
    return parser
