"""The flags of models and of sampling, the models that they name, and what a cache came to."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.sample_utils import make_sampler

from ..lm.checks import vocabulary
from ..lm.generate import load
from ..lm.prompt_cache import (
    beyond_context,
    context_length,
    evicting_caches,
    summary,
    tokens_seen,
)
from ..lm.ranks import ALONE, Ranks, ranks_of
from .parsing import folder, model_path, number, prose, seed


def _value(reading: Callable[[str], Any], default: Any, metavar: str, said: str) -> dict[str, Any]:
    return {"type": reading, "default": default, "metavar": metavar, "help": said}


_PART = number(0, 1, float)
_FLAGS: dict[str, dict[str, Any]] = {
    "--model": _value(model_path, None, "MODEL", "a directory, a name on the hub, or demo"),
    "--adapter-path": _value(folder, None, "DIR", "adapter weights and settings"),
    "--trust-remote-code": {"action": "store_true", "help": "let the tokenizer run its own code"},
    "--prefill-step-size": _value(
        number(1), 2048, "N", "prompt tokens read at a time (default: %(default)s)"
    ),
    "--quantize-activations -qa": {
        "action": "store_true",
        "help": "quantise activations as weights are",
    },
    "--prompt -p": _value(prose, "hello", "TEXT", "or - to read it from standard input"),
    "--system-prompt": _value(prose, None, "TEXT", "for the chat template"),
    "--max-tokens -m": _value(
        number(1, also=-1), None, "N", "at most, or -1: no limit (default: %(default)s)"
    ),
    "--seed": _value(seed, None, "SEED", "of the random state"),
    "--temp": _value(number(0, kind=float), 0.0, "T", "temperature (default: 0, the likeliest)"),
    "--top-p": _value(_PART, 1.0, "P", "of the likeliest tokens with this sum"),
    "--min-p": _value(_PART, 0.0, "P", "as a part of the likeliest token's"),
    "--top-k": _value(number(0), 0, "K", "of the likeliest K tokens"),
    "--xtc-probability": _value(_PART, 0.0, "P", "of XTC at a token"),
    "--xtc-threshold": _value(number(0, 0.5, float), 0.1, "P", "of XTC's choices"),
    "--min-tokens-to-keep": _value(number(1), 1, "N", "with --min-p"),
    "--draft-model": _value(model_path, None, "MODEL", "a small model that proposes tokens"),
    "--num-draft-tokens": _value(
        number(1), 3, "N", "that it proposes at a time (default: %(default)s)"
    ),
}


def add_flags(parser: Any, flags: str, **defaults: Any) -> None:
    """Flags of the table by their names, with these defaults instead of the table's.

    Args:
        parser: a parser, or a group of one.
        flags: names without dashes.
        defaults: by name, with underscores.
    """
    for names, given in _FLAGS.items():
        own = names.split()
        name = own[0][2:]
        if name in flags.split():
            default = defaults.get(name.replace("-", "_"), given.get("default"))
            kept = {} if "action" in given else {"default": default}
            parser.add_argument(*own, **given | kept)


def loaded(
    args: argparse.Namespace, ranks: Ranks = ALONE, **tokenizer_config: Any
) -> tuple[Any, Any]:
    """The model and the tokenizer that the flags name."""
    trusted = {"trust_remote_code": args.trust_remote_code}
    if ranks.size > 1:
        found: tuple[Any, Any] = load(
            args.model, group=ranks.group, tokenizer_config=tokenizer_config | trusted, **trusted
        )
        return found
    quantised = getattr(args, "quantize_activations", False)
    model, tokenizer = load(
        args.model,
        adapter_path=getattr(args, "adapter_path", None),
        tokenizer_config=tokenizer_config | trusted,
        **{"model_config": {"quantize_activations": True}} if quantised else {},
        **trusted,
    )
    return model, tokenizer


def sampler(args: argparse.Namespace, model: Any, tokenizer: Any) -> Callable[[Any], Any]:
    """What chooses tokens as the flags say. Raises ValueError where the model has fewer tokens."""
    top_k = getattr(args, "top_k", 0)
    if top_k >= (known := vocabulary(model)):
        raise ValueError(f"--top-k is {top_k}, expected fewer than all {known} tokens")
    found: Callable[[Any], Any] = make_sampler(
        args.temp,
        args.top_p,
        getattr(args, "min_p", 0.0),
        getattr(args, "min_tokens_to_keep", 1),
        top_k=top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )
    return found


def prompt_of(text: str) -> str:
    """A prompt that was typed, or what standard input has. Raises ValueError where that is no text
    in UTF-8."""
    if text != "-":
        return text
    read_whole_characters("strict")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: {error}") from error


def read_whole_characters(errors: str) -> None:
    """Standard input is UTF-8 from here on: halves of characters are errors, or replaced."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors=errors)


def say_summary(caches: Sequence[Any], model: Any, more: str = "") -> None:
    """The last line of a command: what the caches hold."""
    settings = [cache.config for cache in evicting_caches(caches)]
    policies = dict.fromkeys(one.policy for one in settings if one.max_kv_size is not None)
    by = f"{' and '.join(policies)}{', ' if policies else ''}"
    print(f"KV cache: {by}{summary(caches, model)}{ranks_of(model)}{more}")


def say_where_beyond(model: Any, caches: Sequence[Any]) -> bool:
    """One line where the text is longer than the model is made for."""
    said = beyond_context(context_length(model), tokens_seen(caches))
    if said:
        print(said, file=sys.stderr)
    return bool(said)
