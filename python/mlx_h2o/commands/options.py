"""The flags of a cache, which all commands share, and the settings that they ask for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from .. import policies
from ..config import KV_FORMATS, H2OConfig
from ..lm.profile import Profile
from ..lm.sizing import parsed_bytes

_DEFAULT = H2OConfig()


class OneLineParser(argparse.ArgumentParser):
    """Tells a mistake in one line, and ends with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {in_flags(message)} (--help says what there is)\n")


def in_flags(message: str) -> str:
    """What Python says of a setting, in one line and in the names that are typed."""
    line = re.sub(r"^\[\w+\] ", "", " ".join(message.split()))
    for name in _FLAGS:
        word = rf"(?<![-\w=]){name}\b" if "_" in name else rf"^{name}(?= is )"
        line = re.sub(word, f"--{name.replace('_', '-')}", line)
    return line


def _rows(text: str) -> int | None:
    return None if text == "none" else int(text)


_FLAGS: dict[str, dict[str, Any]] = {
    "max_kv_size": {
        "type": _rows,
        "metavar": "ROWS",
        "help": f"rows per head, at most (default: {_DEFAULT.max_kv_size}); a quarter of the "
        "context is a good start; none: no limit",
    },
    "max_kv_bytes": {
        "metavar": "BYTES",
        "help": "in place of rows: bytes of all layers together, such as 300MB, a draft model's "
        "included; picks the rows, and the bits where --kv-bits does not say",
    },
    "policy": {
        "choices": policies.names(),
        "help": f"what decides which rows stay (default: {_DEFAULT.policy})",
    },
    "sink_size": {
        "type": int,
        "help": f"first rows that always stay (default: {_DEFAULT.sink_size})",
    },
    "prefix_size": {
        "type": int,
        "metavar": "TOKENS",
        "help": "first tokens that always stay, such as a system prompt; a server reads and holds "
        "those of prompts that begin alike once (default: 0)",
    },
    "heavy_size": {"type": int, "help": "rows kept by score (default: half)"},
    "recent_size": {"type": int, "help": "newest rows that stay (default: the rest)"},
    "decay": {
        "type": float,
        "help": f"of h2o's moving average of scores (default: {_DEFAULT.decay})",
    },
    "evict_every": {
        "type": int,
        "help": "rows that are evicted together (default: one row of 32)",
    },
    "shared_heads": {
        "action": "store_true",
        "help": "one choice of rows for all heads of a layer, by the mean of their ranks",
    },
    "random_seed": {
        "type": int,
        "help": f"of the policy random (default: {_DEFAULT.random_seed})",
    },
    "kv_bits": {"type": int, "help": "bits of quantised rows (default: none)"},
    "kv_format": {
        "choices": tuple(KV_FORMATS),
        "metavar": "FORMAT",
        "help": "in place of --kv-bits: rows as codes of rotated directions (TurboQuant): turbo2, "
        "turbo3 or turbo4 bits; turbo8v3: keys of 8 bits and values of 3; turbo0v3: values alone",
    },
    "turbo_guard": {
        "type": int,
        "metavar": "LAYERS",
        "help": "with --kv-format: the first and the last so many layers have 8 bits (default: 0)",
    },
    "kv_group_size": {
        "type": int,
        "help": f"elements that share a scale (default: {_DEFAULT.kv_group_size})",
    },
    "v_bits": {
        "type": int,
        "help": "bits of the values, where they differ from --kv-bits, those of the keys",
    },
    "light_bits": {
        "type": int,
        "help": "mixed precision: bits of the rows that rank in the lower half, or with "
        "--dense-size 0 of the recent rows",
    },
    "dense_size": {
        "type": int,
        "help": "newest rows that are not quantised (default: 32 with --light-bits, else 0)",
    },
    "sparse_v": {
        "type": float,
        "metavar": "TAU",
        "help": "skip the values of quantised rows whose weight is below this, such as 1e-6 "
        "(default: 0, skip none)",
    },
    "preallocate": {
        "nargs": "?",
        "type": int,
        "const": True,
        "metavar": "ROWS",
        "help": "make room for all rows at once; with --max-kv-size none for so many (on Linux's "
        "CPU memory is taken as rows come, elsewhere at once)",
    },
    "quantized_kv_start": {
        "type": int,
        "help": "Only 0: rows are quantised from the first on.",
    },
    "budgets": {
        "metavar": "FILE",
        "help": 'a budget for each layer: a JSON file {"budgets": [ROWS, ...]}',
    },
    "profile": {
        "metavar": "FILE",
        "help": "rows for each layer by what it loses without, as `mlx_h2o calibrate` wrote it; "
        "--max-kv-size is then the mean, and the policy that of the file",
    },
}


def add_cache_flags(parser: argparse.ArgumentParser, only: Sequence[str] = tuple(_FLAGS)) -> None:
    """The flags, or some of them. What is not given is not among the parsed arguments."""
    group = parser.add_argument_group("KV cache")
    for name in only:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, default=argparse.SUPPRESS, **_FLAGS[name])


class CacheSettings(NamedTuple):
    """What the flags ask for: settings, a file of budgets, a profile, and arguments of
    ``fit_bytes`` that the settings are to be made of."""

    config: H2OConfig
    budgets: str | None
    profile: Profile | None
    sized: dict[str, Any] | None


def settings_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace, speculative: int = 0
) -> CacheSettings:
    """The settings of the cache; ends the command where they do not go together."""
    given = dict(vars(args))
    if given.get("quantized_kv_start"):
        parser.error("--quantized-kv-start must be 0: rows are quantised from the first on")
    budgets, profile, sized = given.get("budgets"), None, None
    try:
        if "profile" in given:
            profile = Profile.load(given["profile"])
            if budgets is not None:
                parser.error("--profile with --budgets: expected one of them")
            if given.setdefault("policy", profile.policy) != profile.policy:
                parser.error(f"--policy must be {profile.policy}, which --profile is of")
        settings = {name: given[name] for name in H2OConfig.setting_names() if name in given}
        settings["speculative"] = speculative
        if "max_kv_bytes" in given:
            if "max_kv_size" in given or budgets is not None:
                parser.error("--max-kv-bytes with --max-kv-size or --budgets: expected one of them")
            sized = {"max_kv_bytes": parsed_bytes(given["max_kv_bytes"])} | settings
        return CacheSettings(H2OConfig(**settings), budgets, profile, sized)
    except (OSError, ValueError) as error:
        parser.error(str(error))
