"""What the flags of a cache ask for, and how a command begins."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import H2OConfig, setting_names
from ..lm.layers import LAYERS
from ..lm.prompt_cache import fit_bytes, make_prompt_cache
from ..lm.ranks import ranks_of
from ..lm.sizing import described
from .parsing import OneLineParser, told
from .together import together

FEW_ROWS = 32
"""Rows a head of which little can be expected."""

_DEFAULT = H2OConfig()


@dataclass(frozen=True)
class CacheSettings:
    """What the flags ask for.

    config: the settings.
    budgets: a file of budgets, or None.
    layers: how layers share rows.
    sized: arguments of ``fit_bytes`` that the settings are to be made of, or None.
    """

    config: H2OConfig
    budgets: str | None
    layers: str
    sized: dict[str, Any] | None

    def __str__(self) -> str:
        rows = "" if self.budgets is None else f", rows by layer as in {self.budgets}"
        return f"KV cache: {described(self.config)}{rows}"

    @property
    def given(self) -> bool:
        """Whether there are others than without any flag."""
        return self != CacheSettings(_DEFAULT, None, LAYERS[0], None)

    def fitted(
        self, model: Any, draft_model: Any = None, length: int | None = None
    ) -> CacheSettings:
        """Those that fit into the bytes, for this many tokens if that is known; prints them."""
        if self.sized is None:
            return self
        found = fit_bytes(
            model, draft_model=draft_model, layers=self.layers, length=length, **self.sized
        )
        print(f"KV cache{ranks_of(model)}: {found}", file=sys.stderr)
        if (rows := found.config.max_kv_size or 0) < min(FEW_ROWS, length or FEW_ROWS):
            print(f"{rows} rows a head are too few to be of use: more bytes?", file=sys.stderr)
        return CacheSettings(found.config, None, self.layers, None)

    def caches(self, model: Any, draft_model: Any = None, length: int | None = None) -> list[Any]:
        """Caches of these settings, and behind them those of a draft model."""
        own: dict[str, Any] = {"budgets": self.budgets, "layers": self.layers, "length": length}
        return make_prompt_cache(model, self.config, draft_model=draft_model, **own)


def run_command(command: Any, arguments: Sequence[str]) -> int:
    """Run a module of this package with a command line; returns the exit status."""
    parser: OneLineParser = command.parser()
    args = parser.parse_args(arguments)
    if not hasattr(args, "has_caches"):
        return int(command.run(args))
    settings = settings_of(parser, args)
    with together(parser, args) as ranks:
        command.run(args, settings, ranks)
    return 0


def settings_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> CacheSettings:
    """The settings of the cache; ends the command where they do not go together."""
    given = dict(vars(args))
    drafted = args.num_draft_tokens if given.get("draft_model") else 0
    if given.get("quantized_kv_start"):
        parser.error("--quantized-kv-start must be 0: rows are quantised from the first on")
    budgets, sized = given.get("budgets"), None
    try:
        if "layers" in given and budgets is not None:
            parser.error("--layers with --budgets: expected one of them")
        settings = {name: given[name] for name in setting_names() if name in given}
        settings["speculative"] = drafted
        if "max_kv_bytes" in given:
            if "max_kv_size" in given or budgets is not None:
                parser.error("--max-kv-bytes with --max-kv-size or --budgets: expected one of them")
            sized = {"max_kv_bytes": given["max_kv_bytes"]} | settings
        layers = given.get("layers", LAYERS[0])
        return CacheSettings(H2OConfig.of(**settings), budgets, layers, sized)
    except ValueError as error:
        parser.error(told(error))
