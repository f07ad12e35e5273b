"""The flags of all commands, including those of caches, each with the type that reads it."""

import argparse
import logging
from pathlib import Path
from typing import Any

from mlx_lm.generate import str2bool

from .. import policies
from ..config import KV_FORMATS, H2OConfig
from ..lm.files import check_folder
from ..lm.generate import check_path
from ..lm.layers import LAYERS, read_budgets
from .parsing import OneLineParser, checked, json_object, nbytes, new_file, number, row_count


def _names(text: str) -> list[str]:
    return [name.strip().rstrip("/").lower() for name in text.split(",") if name.strip()]


_PART, _MODEL, _PROSE = number(0, 1, float), checked(str, check_path), checked(str, str.encode)
_ADAPTER = checked(str, lambda folder: Path(folder, "adapter_config.json").read_bytes())
_LEVEL, _FOLDER = checked(str, logging.Logger("").setLevel), checked(str, check_folder)
_USUAL, _UNSAID, _OR_0 = H2OConfig(), argparse.SUPPRESS, lambda text: nbytes(text, "0")
ROWS = f"mean rows per head (default: {_USUAL.max_kv_size})"
_ROWS = f"{ROWS}, or none: no limit; a quarter of the context is a good start"
_OF_HEADS = 'rows per layer or head instead of --max-kv-size: {"budgets": [ROWS, ...]}'
_RANKS = f"{', '.join(policies.names())} (default: {_USUAL.policy.name})"
_BYTES = "memory of the cache, such as 300MB: chooses rows, and bits unless --kv-bits is given"
_FORMAT = "rotated rows: turbo2, turbo3 or turbo4; turbo8v3: keys in 8 bits, values in 3"
_FLAGS: dict[str, tuple[Any, ...]] = {
    "--model": (_MODEL, None, "MODEL", "a directory, a name on the hub, or demo"),
    "--adapter-path": (_ADAPTER, None, "DIR", "adapter weights and settings"),
    "--trust-remote-code": (bool, False, "", "let the tokenizer run its own code"),
    "--output": (new_file, None, "FILE", "JSON file to write"),
    "--pipeline": (bool, False, "", "split layers, not heads, over several processes"),
    "--quantize-activations -qa": (bool, False, "", "quantise activations like the weights"),
    "--prefill-step-size": (number(1), 2048, "N", "prompt tokens read at a time"),
    "--verbose": (str2bool, True, "YES", "false: print only the text"),
    # The prompt
    "--prompt -p": (_PROSE, "hello", "TEXT", "the prompt, or - for standard input"),
    "--system-prompt": (_PROSE, None, "TEXT", "system message for the chat template"),
    "--prefill-response": (_PROSE, None, "TEXT", "beginning of the answer"),
    "--ignore-chat-template": (bool, False, "", "use the prompt as it is"),
    "--use-default-chat-template": (bool, False, "", argparse.SUPPRESS),
    "--chat-template-config": (json_object, {}, "JSON", "arguments for the chat template"),
    "--prompt-cache-file": (str, None, "FILE", "saved prompt to continue, from cache_prompt"),
    "--image": (str, (), "FILE", argparse.SUPPRESS, "+"),
    "--eos-token": (str, None, "TOKEN", "end-of-sequence token of the tokenizer"),
    # The answer
    "--max-tokens -m": (number(1, also=-1), None, "N", "maximum tokens to generate; -1: no limit"),
    "--temp": (number(0, kind=float), 0.0, "T", "sampling temperature (default: 0, greedy)"),
    "--top-p": (_PART, 1.0, "P", "sample from the likeliest tokens of this total probability"),
    "--min-p": (_PART, 0.0, "P", "least probability, as a share of the likeliest token's"),
    "--top-k": (number(0), 0, "K", "sample from the K likeliest tokens (0: from all)"),
    "--xtc-probability": (_PART, 0.0, "P", "probability of XTC sampling at each token"),
    "--xtc-threshold": (number(0, 0.5, float), 0.1, "P", "XTC drops tokens likelier than this"),
    "--min-tokens-to-keep": (number(1), 1, "N", "tokens that --min-p keeps at least"),
    "--seed": (number(0, 2**64 - 1), None, "SEED", "seed for sampling"),
    "--extra-eos-token": (str, (), "TEXT", "further tokens that end the answer", "+"),
    "--draft-model": (_MODEL, None, "MODEL", "small model for speculative decoding"),
    "--num-draft-tokens": (number(1), 3, "N", "tokens that it proposes at a time"),
    # The benchmark
    "--prompt-tokens -p": (number(1), 512, "N", "length of each prompt"),
    "--generation-tokens -g": (number(1), 1024, "N", "tokens to generate"),
    "--batch-size -b": (number(1), 1, "N", "prompts at a time (default: 1)"),
    "--num-trials -n": (number(1), 5, "N", "timed runs, after a warm-up"),
    "--delay": (number(0), 0, "N", "seconds between runs"),
    # The server
    "--host": (str, "127.0.0.1", "HOST", "address to listen on"),
    "--port": (number(0, 65535), 8080, "PORT", "port to listen on; 0: a free one"),
    "--api-key": (_PROSE, None, "KEY", "key that clients must send"),
    "--allowed-hosts": (_names, [], "NAMES", "host names to answer to; *: any"),
    "--allowed-origins": (_names, [], "ORIGINS", "origins whose web pages are served; *: any"),
    "--max-body": (nbytes, 1 << 24, "BYTES", "maximum size of a request"),
    "--grace": (number(0, kind=float), 30.0, "SECONDS", "time for running answers at shutdown"),
    "--log-level": (_LEVEL, "INFO", "LEVEL", "DEBUG, INFO, WARNING or ERROR"),
    "--chat-template": (str, None, "TEXT", "chat template instead of the model's"),
    "--chat-template-args": (json_object, {}, "JSON", 'such as {"enable_thinking": false}'),
    "--memory": (nbytes, None, "BYTES", "for weights, caches and the rest (default: 3/4 of RAM)"),
    "--decode-concurrency": (number(1), None, "N", "answers generated together (32, if they fit)"),
    "--prompt-concurrency": (number(1), None, "N", "prompts read together (8, if they fit)"),
    "--max-queue": (number(1), 512, "N", "maximum requests waiting"),
    "--prompt-cache-size": (number(0), 1024, "N", "number of prompt prefixes to keep"),
    "--prompt-cache-bytes": (_OR_0, None, "BYTES", "size (0: off; default: 1/4 beside weights)"),
    "--cache-dir": (_FOLDER, None, "DIR", "directory to keep prompts in across restarts"),
    "--cache-size": (nbytes, 10**10, "BYTES", "maximum size of that directory"),
    # Rows of the KV cache
    "--max-kv-size": (row_count, _UNSAID, "ROWS", _ROWS),
    "--max-kv-bytes": (nbytes, _UNSAID, "BYTES", _BYTES),
    "--budgets": (checked(str, read_budgets), _UNSAID, "FILE", _OF_HEADS),
    "--layers": (LAYERS, _UNSAID, None, f"how heads share the rows (default: {LAYERS[0]})"),
    "--preallocate": (int, _UNSAID, "ROWS", "allocate all rows, or this many, at the start", "?"),
    # Which rows stay
    "--policy": (policies.names(), _UNSAID, "POLICY", _RANKS),
    "--sink-size": (int, _UNSAID, "ROWS", f"first rows, kept (default: {_USUAL.budget.sink_size})"),
    "--heavy-size": (int, _UNSAID, "ROWS", "rows kept by rank (default: half; h2o: the rest)"),
    "--recent-size": (int, _UNSAID, "ROWS", "newest rows, kept (default: the rest; h2o: 1/4)"),
    "--context-size": (int, _UNSAID, "TOKENS", "evict rows further back than this first (0: off)"),
    "--decay": (float, _UNSAID, "DECAY", f"of h2o-ema's scores (default: {policies.H2OEma.decay})"),
    "--evict-every": (int, _UNSAID, "ROWS", "rows evicted at a time (default: budget / 32)"),
    "--random-seed": (int, _UNSAID, "SEED", "seed of the policy random (default: 0)"),
    # Bits of rows
    "--kv-bits": (int, _UNSAID, "BITS", "quantise rows to this many bits (default: off)"),
    "--v-bits": (int, _UNSAID, "BITS", "bits of values (default: those of --kv-bits)"),
    "--kv-group-size": (int, _UNSAID, "SIZE", f"group size (default: {_USUAL.kv_group_size})"),
    "--light-bits": (int, _UNSAID, "BITS", "bits of the lower-ranked half"),
    "--dense-size": (int, _UNSAID, "ROWS", "newest rows left unquantised (default: 0, 8 or 32)"),
    "--kv-format": (tuple(KV_FORMATS), _UNSAID, "FORMAT", _FORMAT),
    "--sparse-v": (float, _UNSAID, "WEIGHT", "skip values of smaller weight, such as 1e-6"),
    "--quantized-kv-start": (int, _UNSAID, "0", "only 0: all rows are quantised, from the first"),
}
"""For each flag: the type or choices, the default, the name of its value, the help text, and nargs
if any. A flag of caches that the user leaves out is missing from the parsed arguments."""

_CACHE = {
    "rows of the KV cache": "max-kv-size max-kv-bytes budgets layers preallocate",
    "which rows stay": "policy sink-size heavy-size recent-size context-size decay evict-every "
    "random-seed",
    "bits of rows": "kv-bits v-bits kv-group-size light-bits dense-size kv-format sparse-v "
    "quantized-kv-start",
}
"""Flags of caches by their groups."""


def cache_parser(said: str, first: str, groups: dict[str, str], **defaults: Any) -> OneLineParser:
    """The parser of a command that has caches, with all flags of caches.

    Args:
        first: flags that --help explains.
        groups: flags by the titles of their groups; "": flags outside of groups.
        defaults: as in :func:`add_flags`.
    """
    found = OneLineParser(said, first)
    for title, flags in (groups | _CACHE).items():
        add_flags(found.add_argument_group(title) if title else found, flags, **defaults)
    return found


def add_flags(parser: Any, flags: str, **defaults: Any) -> None:
    """Add flags of the table by their names, with these defaults instead of the table's.

    Args:
        parser: a parser, or a group of one.
        flags: names without dashes.
        defaults: by name, with underscores; ...: the flag is required; or a line of the table.
    """
    for name in flags.split():
        names = next(one for one in _FLAGS if one.split()[0] == f"--{name}")
        reading, default, metavar, said, *count = _FLAGS[names]
        own = defaults.get(name.replace("-", "_"), default)
        if own and isinstance(own, tuple):
            reading, own, metavar, said = own
        given: dict[str, Any] = {"help": said}
        given |= {"required": True} if own is ... else {"default": own}
        if reading is bool:
            parser.add_argument(*names.split(), action="store_true", **given)
            continue
        given |= {"choices": reading} if isinstance(reading, tuple) else {"type": reading}
        for nargs in count:
            given |= {"nargs": nargs, "const": True if nargs == "?" else None}
        parser.add_argument(*names.split(), metavar=metavar, **given)
