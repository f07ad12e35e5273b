"""The flags of the commands, beside those of caches: each with what reads it."""

from __future__ import annotations

import argparse
from typing import Any

from .parsing import (
    folder,
    is_yes,
    json_object,
    log_level,
    model_path,
    names_of,
    nbytes,
    number,
    prose,
    seed,
)

_PART = number(0, 1, float)
_FLAGS: dict[str, tuple[Any, ...]] = {
    "--model": (model_path, None, "MODEL", "a directory, a name on the hub, or demo"),
    "--adapter-path": (folder, None, "DIR", "adapter weights and settings"),
    "--trust-remote-code": (bool, False, "", "let the tokenizer run its own code"),
    "--quantize-activations -qa": (bool, False, "", "quantise activations as weights are"),
    "--prefill-step-size": (number(1), 2048, "N", "prompt tokens read at a time"),
    "--verbose": (is_yes, True, "YES", "false: print only the text"),
    # The prompt
    "--prompt -p": (prose, "hello", "TEXT", "the prompt, or - for standard input"),
    "--system-prompt": (prose, None, "TEXT", "for the chat template"),
    "--prefill-response": (prose, None, "TEXT", "how the answer begins"),
    "--ignore-chat-template": (bool, False, "", "take the prompt as it is"),
    "--use-default-chat-template": (bool, False, "", argparse.SUPPRESS),
    "--chat-template-config": (json_object, {}, "JSON", "for the chat template"),
    "--prompt-cache-file": (str, None, "FILE", "of cache_prompt, to go on from"),
    "--image": (str, None, "FILE", argparse.SUPPRESS, "+"),
    "--eos-token": (str, None, "TOKEN", "of the tokenizer"),
    # The answer
    "--max-tokens -m": (number(1, also=-1), None, "N", "tokens to write at most, or -1: no limit"),
    "--temp": (number(0, kind=float), 0.0, "T", "temperature (default: 0, the likeliest)"),
    "--top-p": (_PART, 1.0, "P", "of the likeliest tokens with this sum"),
    "--min-p": (_PART, 0.0, "P", "as a part of the likeliest token's"),
    "--top-k": (number(0), 0, "K", "of the likeliest K tokens; 0: of all"),
    "--xtc-probability": (_PART, 0.0, "P", "of XTC at a token"),
    "--xtc-threshold": (number(0, 0.5, float), 0.1, "P", "of XTC's choices"),
    "--min-tokens-to-keep": (number(1), 1, "N", "with --min-p"),
    "--seed": (seed, None, "SEED", "of the random state"),
    "--extra-eos-token": (str, (), "TEXT", "tokens that end it", "+"),
    "--draft-model": (model_path, None, "MODEL", "a small model that proposes tokens"),
    "--num-draft-tokens": (number(1), 3, "N", "that it proposes at a time"),
    # The benchmark
    "--prompt-tokens -p": (number(1), 512, "N", "of each prompt"),
    "--generation-tokens -g": (number(1), 1024, "N", "to write"),
    "--batch-size -b": (number(1), 1, "N", "prompts at a time (default: 1)"),
    "--num-trials -n": (number(1), 5, "N", "timed runs, after a warm-up"),
    "--delay": (number(0), 0, "N", "seconds between runs"),
    # The server
    "--host": (str, "127.0.0.1", "HOST", "where to listen"),
    "--port": (number(0, 65535), 8080, "PORT", "where to listen; 0: a free one"),
    "--api-key": (str, None, "KEY", "that clients must send"),
    "--allowed-hosts": (names_of, [], "NAMES", "of this server besides addresses; *: any"),
    "--allowed-origins": (names_of, [], "ORIGINS", "whose web pages may ask; *: any"),
    "--max-body": (nbytes, 1 << 26, "BYTES", "of a request"),
    "--grace": (number(0, kind=float), 30.0, "SECONDS", "for running answers at the end"),
    "--log-level": (log_level, "INFO", "LEVEL", "DEBUG, INFO, WARNING or ERROR"),
    "--chat-template": (str, None, "TEXT", "a chat template instead of the model's"),
    "--chat-template-args": (json_object, {}, "JSON", 'such as {"enable_thinking": false}'),
    "--memory": (nbytes, None, "BYTES", "for weights, caches and the rest (default: 3/4 of all)"),
    "--decode-concurrency": (number(1), 32, "N", "requests answered together"),
    "--prompt-concurrency": (number(1), 8, "N", "prompts read together"),
    "--max-queue": (number(1), 512, "N", "requests that may wait"),
    "--prompt-cache-size": (number(0), 1024, "N", "beginnings of prompts kept"),
    "--prompt-cache-bytes": (nbytes, None, "BYTES", "of these (default: 1/4 beside the weights)"),
    "--cache-dir": (str, None, "DIR", "where prompts are kept for the next start"),
    "--cache-size": (nbytes, 10**10, "BYTES", "of that directory"),
}
"""What reads a flag, its default, what its value is called, what it is, and how many values."""


def add_flags(parser: Any, flags: str, **defaults: Any) -> None:
    """Flags of the table by their names, with these defaults instead of the table's.

    Args:
        parser: a parser, or a group of one.
        flags: names without dashes.
        defaults: by name, with underscores; ...: none, and the flag has to be given.
    """
    for name in flags.split():
        names = next(one.split() for one in _FLAGS if one.split()[0] == f"--{name}")
        reading, default, metavar, said, *count = _FLAGS[" ".join(names)]
        default = defaults.get(name.replace("-", "_"), default)
        if reading is bool:
            parser.add_argument(*names, action="store_true", help=said)
            continue
        given = {"required": True} if default is ... else {"default": default}
        given |= {"nargs": count[0]} if count else {}
        parser.add_argument(*names, type=reading, metavar=metavar, help=said, **given)
