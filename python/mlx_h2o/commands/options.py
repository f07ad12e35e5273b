"""The flags of eviction and quantised rows that the commands share, and what they ask for."""

from __future__ import annotations

import argparse

from .. import policies
from ..config import H2OConfig

__all__ = ["add_eviction", "add_quantisation", "config_of", "explain"]


def add_eviction(parser: argparse.ArgumentParser) -> None:
    """``--policy``, the sizes and what else decides which rows stay."""
    defaults = H2OConfig()
    ours = parser.add_argument_group(
        "eviction", f"--max-kv-size is {defaults.max_kv_size} where it is not given"
    )
    ours.add_argument(
        "--policy",
        choices=policies.names(),
        default=defaults.policy,
        help="what decides which rows stay (default: %(default)s)",
    )
    ours.add_argument(
        "--sink-size",
        type=int,
        default=defaults.sink_size,
        help="first rows that always stay (default: %(default)s)",
    )
    ours.add_argument("--heavy-size", type=int, help="rows kept by score (default: half)")
    ours.add_argument("--recent-size", type=int, help="newest rows that stay (default: the rest)")
    ours.add_argument(
        "--decay",
        type=float,
        default=defaults.decay,
        help="decay of the moving average of scores (default: %(default)s)",
    )
    ours.add_argument(
        "--evict-every",
        type=int,
        default=defaults.evict_every,
        help="tokens per eviction (default: %(default)s)",
    )
    ours.add_argument(
        "--shared-heads",
        action="store_true",
        help="one choice of rows for all heads of a layer, by the mean of their ranks",
    )
    ours.add_argument(
        "--random-seed",
        type=int,
        default=defaults.random_seed,
        help="of the policy random (default: %(default)s)",
    )
    ours.add_argument(
        "--v-bits",
        type=int,
        help="bits of the values, where they differ from --kv-bits, those of the keys",
    )
    ours.add_argument(
        "--light-bits",
        type=int,
        help="mixed precision: bits of the rows that rank in the lower half",
    )
    ours.add_argument(
        "--dense-size",
        type=int,
        help="newest rows that are not quantised (default: 32 with --light-bits, else 0)",
    )


def add_quantisation(parser: argparse.ArgumentParser) -> None:
    """``--max-kv-size`` and mlx_lm's flags of quantised caches, for commands that lack them."""
    size, group = H2OConfig.max_kv_size, H2OConfig.kv_group_size
    parser.add_argument(
        "--max-kv-size", type=int, default=size, help="rows kept per head (default: %(default)s)"
    )
    parser.add_argument("--kv-bits", type=int, help="bits of quantised rows (default: none)")
    parser.add_argument(
        "--kv-group-size", type=int, default=group, help="of quantised rows (default: %(default)s)"
    )
    parser.add_argument(
        "--quantized-kv-start", type=int, default=0, help="only 0: rows are quantised as they come"
    )


def explain(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Replace the help of one of mlx_lm's flags, whose meaning here is narrower."""
    for action in parser._actions:
        if action.dest == name:
            action.help = text


def config_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace, speculative: int = 0
) -> H2OConfig:
    """The settings that the flags ask for; ends the command where they do not go together."""
    if args.quantized_kv_start:
        parser.error("--quantized-kv-start must be 0: rows are quantised from the first on")
    found = {name: getattr(args, name, None) for name in H2OConfig.setting_names()}
    given = {name: value for name, value in found.items() if value is not None}
    try:
        return H2OConfig(**(given | {"speculative": speculative}))
    except ValueError as error:
        parser.error(str(error))
