"""The models and sampling that flags name, prompts, and what a cache came to."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from mlx_lm.sample_utils import make_sampler

from ..lm.generate import load
from ..lm.generation_checks import vocabulary
from ..lm.prompt_cache import beyond_context, context_length, evicting_caches, summary
from ..lm.ranks import ALONE, Ranks, ranks_of


def loaded(
    args: argparse.Namespace, ranks: Ranks = ALONE, **tokenizer_config: Any
) -> tuple[Any, Any]:
    """The model and the tokenizer that the flags name."""
    given: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    given["tokenizer_config"] = tokenizer_config | given
    if adapter := getattr(args, "adapter_path", None):
        given["adapter_path"] = adapter
    if getattr(args, "quantize_activations", False):
        given["model_config"] = {"quantize_activations": True}
    return cast(tuple[Any, Any], load(args.model, group=ranks.group, **given))


def sampler(args: argparse.Namespace, model: Any, tokenizer: Any) -> Callable[[Any], Any]:
    """What chooses tokens as the flags say. Raises ValueError where the model has fewer tokens."""
    top_k = getattr(args, "top_k", 0)
    if top_k >= (known := vocabulary(model)):
        raise ValueError(f"--top-k is {top_k}, expected fewer than all {known} tokens")
    least = getattr(args, "min_p", 0.0), getattr(args, "min_tokens_to_keep", 1)
    found = make_sampler(
        args.temp, args.top_p, *least, top_k, args.xtc_probability, args.xtc_threshold,
        tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )  # fmt: skip
    return ranks_of(model).agreed(found)


def templated(
    tokenizer: Any, system: str | None, question: str, begun: str | None = None, **more: Any
) -> Any:
    """A question in the chat template, behind what the system says; ``begun``: its answer."""
    said = [("system", system), ("user", question), ("assistant", begun)]
    messages = [{"role": role, "content": text} for role, text in said if text is not None]
    goes_on = begun is not None
    more = {"continue_final_message": goes_on, "add_generation_prompt": not goes_on} | more
    return tokenizer.apply_chat_template(messages, **more)


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
    policies = dict.fromkeys(one.policy.name for one in settings if one.max_kv_size is not None)
    by = f"{' and '.join(policies)}{', ' if policies else ''}"
    print(f"KV cache: {by}{summary(caches, model)}{ranks_of(model)}{more}")


def say_where_beyond(model: Any, caches: Sequence[Any]) -> bool:
    """One line where the text is longer than the model's trained context."""
    seen = max((cache.offset for cache in evicting_caches(caches)), default=0)
    said = beyond_context(context_length(model), seen)
    if said:
        print(said, file=sys.stderr)
    return bool(said)
