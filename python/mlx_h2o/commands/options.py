"""The flags of a cache, which all commands share, and the settings that they ask for."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from .. import policies
from ..config import KV_FORMATS, H2OConfig
from ..lm.budgets import read as read_budgets
from ..lm.files import check_writable
from ..lm.layers import LAYERS
from ..lm.saving import with_suffix
from ..lm.sizing import parsed_bytes

_DEFAULT = H2OConfig()


class OneLineParser(argparse.ArgumentParser):
    """Tells a mistake in one line, and ends with 2. Values are checked as they are read, those of
    mlx_lm's flags too."""

    def add_argument(self, *names: Any, **given: Any) -> argparse.Action:
        for name in names:
            if reading := _READ.get(self.prog.rpartition(" ")[2] + name, _READ.get(name)):
                given["type"] = reading
        return super().add_argument(*names, **given)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {in_flags(message)} (see --help)\n")


def in_flags(message: str) -> str:
    """What Python says of a setting, in one line and in the names that are typed."""
    line = re.sub(r"^\[(\w+|Errno \d+)\] ", "", " ".join(message.split()))
    for name in _FLAGS:
        word = rf"(?<![-\w=]){name}\b" if "_" in name else rf"^{name}(?= is )"
        line = re.sub(word, f"--{name.replace('_', '-')}", line)
    return line


def _checked(reading: Callable[[str], Any], check: Callable[[Any], Any]) -> Callable[[str], Any]:
    """A type of argparse: what ``reading`` makes of a text, unless ``check`` raises an error."""

    def read(text: str) -> Any:
        found = reading(text)
        try:
            check(found)
        except (OSError, TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(in_flags(str(error))) from error
        return found

    read.__name__ = reading.__name__
    return read


def number(
    least: float, most: float = sys.maxsize, kind: type = int, also: int | None = None
) -> Callable[[str], Any]:
    """A type of argparse: a number of this kind and range, or the other one."""

    def check(found: float) -> None:
        if not least <= found <= most and found != also:
            end = f"at least {least}" if most == sys.maxsize else f"{least} to {most}"
            more = "" if also is None else f", or {also}"
            raise ValueError(f"{found} is out of range, expected {end}{more}")

    return _checked(kind, check)


def number_of_bytes(text: str) -> int:
    """A type of argparse: bytes, such as 300MB."""
    return parsed_bytes(_checked(str, parsed_bytes)(text))


new_file = _checked(Path, check_writable)
"""A type of argparse: a file that can be written."""

_READ = {
    flag: reading
    for reading, flags in (
        (number(0, kind=float), "--temp"),
        (number(0, 1, float), "--top-p --min-p --xtc-probability"),
        (number(0, 0.5, float), "--xtc-threshold"),
        (number(0), "--top-k --delay"),
        (number(1), "--prompt-concurrency --decode-concurrency --min-tokens-to-keep --num-trials"),
        (number(1), "--prefill-step-size --prompt-tokens --generation-tokens --batch-size"),
        (number(1), "server--max-tokens"),
        (number(1, also=-1), "--max-tokens"),
        (number(0, 65535), "--port"),
        (_checked(str, lambda text: {**json.loads(text)}), "--chat-template-config"),
        (_checked(str, os.listdir), "--adapter-path"),
        (_checked(str, str.encode), "--prompt --system-prompt --prefill-response"),
        (_checked(with_suffix, check_writable), "cache_prompt--prompt-cache-file"),
    )
    for flag in flags.split()
}
"""How mlx_lm's flags are read, of one command or of all."""


def _rows(text: str) -> int | None:
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of rows, expected one, or none"
        ) from None


_FLAGS: dict[str, dict[str, Any]] = {
    "max_kv_size": {
        "type": _rows,
        "metavar": "ROWS",
        "help": f"rows kept per KV head (default: {_DEFAULT.max_kv_size}), or none for no limit; a "
        "quarter of the context is a good start",
    },
    "max_kv_bytes": {
        "type": number_of_bytes,
        "metavar": "BYTES",
        "help": "a budget in bytes instead of rows, such as 300MB, for all layers and a draft "
        "model together; chooses the number of rows, and the bits unless --kv-bits is given",
    },
    "policy": {
        "choices": policies.names(),
        "metavar": "POLICY",
        "help": f"which rows to keep: {', '.join(policies.names())} (default: {_DEFAULT.policy})",
    },
    "sink_size": {
        "type": int,
        "metavar": "ROWS",
        "help": f"first rows, never evicted (default: {_DEFAULT.sink_size})",
    },
    "prefix_size": {
        "type": int,
        "metavar": "TOKENS",
        "help": "first tokens, never evicted, such as a system prompt (default: 0)",
    },
    "heavy_size": {"type": int, "metavar": "ROWS", "help": "rows kept by rank (default: half)"},
    "recent_size": {
        "type": int,
        "metavar": "ROWS",
        "help": "newest rows, never evicted (default: the rest)",
    },
    "context_size": {
        "type": int,
        "metavar": "TOKENS",
        "help": "rows further back than this are evicted first (default: the model's context; "
        "0: no such limit)",
    },
    "decay": {
        "type": float,
        "metavar": "DECAY",
        "help": f"decay of h2o's moving average of scores (default: {_DEFAULT.decay})",
    },
    "evict_every": {
        "type": int,
        "metavar": "ROWS",
        "help": "rows evicted at a time (default: a thirty-second of them)",
    },
    "shared_heads": {
        "action": "store_true",
        "help": "keep the same rows in all KV heads of a layer, by their mean rank",
    },
    "random_seed": {
        "type": int,
        "metavar": "SEED",
        "help": f"seed of the policy random (default: {_DEFAULT.random_seed})",
    },
    "kv_bits": {
        "type": int,
        "metavar": "BITS",
        "help": "quantise rows to this many bits (default: off)",
    },
    "kv_format": {
        "choices": tuple(KV_FORMATS),
        "metavar": "FORMAT",
        "help": "store rows as codes of rotated vectors (TurboQuant), instead of --kv-bits: "
        "turbo2, turbo3 or turbo4, by bits; turbo8v3 has keys of 8 bits and values of 3, turbo0v3 "
        "unquantised keys",
    },
    "kv_group_size": {
        "type": int,
        "metavar": "SIZE",
        "help": f"elements that share a scale (default: {_DEFAULT.kv_group_size})",
    },
    "v_bits": {
        "type": int,
        "metavar": "BITS",
        "help": "bits of values (default: those of --kv-bits)",
    },
    "light_bits": {
        "type": int,
        "metavar": "BITS",
        "help": "mixed precision: bits of the lower-ranked half of the rows, or with --dense-size "
        "0 of the recent rows",
    },
    "dense_size": {
        "type": int,
        "metavar": "ROWS",
        "help": "newest rows, left unquantised (default: 32 with --light-bits, else 0)",
    },
    "sparse_v": {
        "type": float,
        "metavar": "WEIGHT",
        "help": "in quantised rows, skip values whose attention weight is below this, such as 1e-6 "
        "(default: 0, skip none)",
    },
    "preallocate": {
        "nargs": "?",
        "type": int,
        "const": True,
        "metavar": "ROWS",
        "help": "allocate all rows at the start, or with --max-kv-size none this many (on Linux, "
        "CPU memory is taken only as rows arrive)",
    },
    "quantized_kv_start": {
        "type": int,
        "metavar": "0",
        "help": "only 0: all rows are quantised, from the first",
    },
    "budgets": {
        "type": _checked(str, read_budgets),
        "metavar": "FILE",
        "help": "rows of each layer, or a list of those of its KV heads, as JSON: "
        '{"budgets": [ROWS, ...]}',
    },
    "layers": {
        "choices": LAYERS,
        "help": "probe: more rows for the KV heads that retrieve, --max-kv-size on average; "
        f"equal: as many for every head (default: {LAYERS[0]})",
    },
}


def add_cache_flags(parser: argparse.ArgumentParser, only: Sequence[str] = tuple(_FLAGS)) -> None:
    """The flags, or some of them. What is not given is not among the parsed arguments."""
    group = parser.add_argument_group("KV cache")
    for name in only:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, default=argparse.SUPPRESS, **_FLAGS[name])


class CacheSettings(NamedTuple):
    """What the flags ask for: settings, a file of budgets, how layers share rows, and arguments of
    ``fit_bytes`` that the settings are to be made of."""

    config: H2OConfig
    budgets: str | None
    layers: str
    sized: dict[str, Any] | None


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
        settings = {name: given[name] for name in H2OConfig.setting_names() if name in given}
        settings["speculative"] = speculative
        if "max_kv_bytes" in given:
            if "max_kv_size" in given or budgets is not None:
                parser.error("--max-kv-bytes with --max-kv-size or --budgets: expected one of them")
            sized = {"max_kv_bytes": given["max_kv_bytes"]} | settings
        layers = given.get("layers", LAYERS[0])
        return CacheSettings(H2OConfig(**settings), budgets, layers, sized)
    except ValueError as error:
        parser.error(str(error))
