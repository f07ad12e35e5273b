"""The flags of a cache, which all commands share, and the caches that they ask for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import policies
from ..config import KV_FORMATS, H2OConfig, setting_names
from ..lm.budgets import read as read_budgets
from ..lm.layers import LAYERS
from ..lm.prompt_cache import fit_bytes, make_prompt_cache
from ..lm.ranks import ranks_of
from ..lm.sizing import described
from .parsing import checked, nbytes, told

FEW = 32
"""Rows a head of which little can be expected."""

_DEFAULT = H2OConfig()


def _rows(text: str) -> int | None:
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of rows, expected one, or none"
        ) from None


def _number(metavar: str, said: str, kind: type = int) -> dict[str, Any]:
    return {"type": kind, "metavar": metavar, "help": said}


_GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "rows of the KV cache": {
        "max_kv_size": {
            "type": _rows,
            "metavar": "ROWS",
            "help": f"rows per head (default: {_DEFAULT.max_kv_size}), or none: no limit; "
            "a quarter of the context is a good start",
        },
        "max_kv_bytes": {
            "type": nbytes,
            "metavar": "BYTES",
            "help": "memory of the cache, such as 300MB: chooses rows, and bits unless "
            "--kv-bits is given",
        },
        "budgets": {
            "type": checked(str, read_budgets),
            "metavar": "FILE",
            "help": 'rows of layers or heads: {"budgets": [ROWS, ...]}',
        },
        "layers": {
            "choices": LAYERS,
            "help": f"rows of heads that retrieve (default: {LAYERS[0]})",
        },
        "preallocate": _number("ROWS", "allocate all rows, or this many, at the start")
        | {"nargs": "?", "const": True},
    },
    "which rows stay": {
        "policy": {
            "choices": policies.names(),
            "metavar": "POLICY",
            "help": f"{', '.join(policies.names())} (default: {_DEFAULT.policy.name})",
        },
        "sink_size": _number("ROWS", f"first rows, kept (default: {_DEFAULT.budget.sink_size})"),
        "prefix_size": _number("TOKENS", "first tokens, kept, as of a system prompt"),
        "heavy_size": _number("ROWS", "rows kept by rank (default: half)"),
        "recent_size": _number("ROWS", "newest rows, kept (default: the rest)"),
        "context_size": _number("TOKENS", "rows further back go first (0: none do)"),
        "decay": _number("DECAY", f"of h2o's scores (default: {policies.H2OEma.decay})", float),
        "evict_every": _number("ROWS", "rows evicted at a time (default: 1/32 of them)"),
        "random_seed": _number("SEED", "of the policy random (default: 0)"),
    },
    "bits of rows": {
        "kv_bits": _number("BITS", "quantise rows to this many bits (default: off)"),
        "v_bits": _number("BITS", "of values (default: those of --kv-bits)"),
        "kv_group_size": _number("SIZE", f"of a scale (default: {_DEFAULT.kv_group_size})"),
        "light_bits": _number("BITS", "of the half of lower rank"),
        "dense_size": _number("ROWS", "newest rows that stay unquantised"),
        "kv_format": {
            "choices": tuple(KV_FORMATS),
            "metavar": "FORMAT",
            "help": "rotated rows: turbo2, turbo3 or turbo4; turbo8v3: keys in 8 bits, values in 3",
        },
        "sparse_v": _number("WEIGHT", "skip values of less attention, such as 1e-6", float),
        "quantized_kv_start": _number("0", "only 0: all rows are quantised, from the first"),
    },
}


def add_cache_flags(parser: argparse.ArgumentParser, only: Sequence[str] = ()) -> None:
    """The flags, or some of them. What is not given is not among the parsed arguments."""
    for title, flags in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name, given in flags.items():
            if not only or name in only:
                flag = f"--{name.replace('_', '-')}"
                group.add_argument(flag, default=argparse.SUPPRESS, **given)


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
        if (rows := found.config.max_kv_size or 0) < FEW:
            print(f"{rows} rows a head are too few to be of use: more bytes?", file=sys.stderr)
        return CacheSettings(found.config, None, self.layers, None)

    def caches(self, model: Any, draft_model: Any = None, length: int | None = None) -> list[Any]:
        """Caches of these settings, and behind them those of a draft model."""
        own: dict[str, Any] = {"budgets": self.budgets, "layers": self.layers, "length": length}
        return make_prompt_cache(model, self.config, draft_model=draft_model, **own)


def settings_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace, speculative: int = 0
) -> CacheSettings:
    """The settings of the cache; ends the command where they do not go together."""
    given = dict(vars(args))
    if given.get("quantized_kv_start"):
        parser.error("--quantized-kv-start must be 0: rows are quantised from the first on")
    budgets, sized = given.get("budgets"), None
    try:
        if "layers" in given and budgets is not None:
            parser.error("--layers with --budgets: expected one of them")
        settings = {name: given[name] for name in setting_names() if name in given}
        settings["speculative"] = speculative
        if "max_kv_bytes" in given:
            if "max_kv_size" in given or budgets is not None:
                parser.error("--max-kv-bytes with --max-kv-size or --budgets: expected one of them")
            sized = {"max_kv_bytes": given["max_kv_bytes"]} | settings
        layers = given.get("layers", LAYERS[0])
        return CacheSettings(H2OConfig.of(**settings), budgets, layers, sized)
    except ValueError as error:
        parser.error(told(error))
