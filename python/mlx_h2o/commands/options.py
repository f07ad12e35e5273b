"""Models, caches and samplers as the flags ask for them, and the last lines of a command."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from ..config import H2OConfig, setting_names
from ..errors import LARGEST
from ..lm import prompt_cache
from ..lm.generate import load
from ..lm.generation_checks import vocabulary
from ..lm.ranks import ALONE, Ranks, ranks_of
from ..lm.routing import context_length, evicting_caches
from ..lm.sizing import described
from ..serving.sampling import spared_tokens
from .parsing import told

FEW_ROWS = 32
"""With fewer rows per head, little can be expected."""


@dataclass(frozen=True)
class CacheSettings:
    """The cache settings that the flags ask for."""

    given: dict[str, Any]  # arguments of make_prompt_cache, besides its models and length

    def __str__(self) -> str:
        file = self.given.get("budgets", "")
        return f"KV cache: {described(self.config, file and f'rows by layer as in {file}')}"

    @property
    def config(self) -> H2OConfig:
        """The settings, without regard to ``max_kv_bytes``."""
        found = self.given.get("max_kv_size")
        if isinstance(found, H2OConfig):
            return found
        names = self.given.keys() & setting_names()
        rows = {"max_kv_size": LARGEST} if "max_kv_bytes" in self.given else {}  # as many as fit
        return H2OConfig.of(**rows | {name: self.given[name] for name in names})

    def fitted(
        self, model: Any, draft_model: Any = None, length: int | None = None
    ) -> CacheSettings:
        """Settings that fit into the bytes, for ``length`` tokens if that is known; prints them."""
        if "max_kv_bytes" not in self.given:
            return self
        found = prompt_cache.fit_bytes(model, draft_model=draft_model, length=length, **self.given)
        print(f"KV cache{ranks_of(model)}: {found}", file=sys.stderr)
        if (rows := found.config.max_kv_size or 0) < min(FEW_ROWS, length or FEW_ROWS):
            print(f"{rows} rows a head are too few to be useful: more bytes?", file=sys.stderr)
        shared = {name: one for name, one in self.given.items() if name == "layers"}
        return CacheSettings({"max_kv_size": found.config} | shared)

    def caches(self, model: Any, draft_model: Any = None, length: int | None = None) -> list[Any]:
        """Caches of these settings, followed by those of a draft model."""
        given = {"draft_model": draft_model, "length": length} | self.given
        return prompt_cache.make_prompt_cache(model, **given)


def settings_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> CacheSettings:
    """The settings of the cache; ends the command if they conflict."""
    typed = vars(args)
    if typed.get("quantized_kv_start"):
        parser.error("--quantized-kv-start must be 0: rows are quantised from the first on")
    if {"layers", "budgets"} <= typed.keys():
        parser.error("--layers with --budgets: expected one of them")
    if "max_kv_bytes" in typed and {"max_kv_size", "budgets"} & typed.keys():
        parser.error("--max-kv-bytes with --max-kv-size or --budgets: expected one of them")
    given = {name: typed[name] for name in typed.keys() & prompt_cache.NAMES}
    if typed.get("draft_model"):
        given["speculative"] = args.num_draft_tokens
    found = CacheSettings(given)
    try:
        _ = found.config  # refuse wrong settings before the model is loaded
    except ValueError as error:
        parser.error(told(error))
    return found


def loaded(
    args: argparse.Namespace, ranks: Ranks = ALONE, **tokenizer_config: Any
) -> tuple[Any, Any]:
    """The model and the tokenizer that the flags name."""
    given: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    given["tokenizer_config"] = tokenizer_config | given
    names = "adapter_path", "pipeline"
    given |= {name: vars(args)[name] for name in names if vars(args).get(name)}
    if getattr(args, "quantize_activations", False):
        given["model_config"] = {"quantize_activations": True}
    return cast(tuple[Any, Any], load(args.model, group=ranks.group, **given))


def sampler(args: argparse.Namespace, model: Any, tokenizer: Any) -> Callable[[Any], Any]:
    """The sampler that the flags ask for. Raises ValueError for counts of the whole vocabulary."""
    known, top_k = vocabulary(model), getattr(args, "top_k", 0)
    least = getattr(args, "min_p", 0.0), getattr(args, "min_tokens_to_keep", 1)
    for name, count in (("top-k", top_k), ("min-tokens-to-keep", least[1])):
        if count >= known:
            raise ValueError(f"--{name} is {count}, expected fewer than all {known} tokens")
    xtc: Any = args.xtc_probability, args.xtc_threshold, spared_tokens(tokenizer, known)
    return ranks_of(model).agreed(make_sampler(args.temp, args.top_p, *least, top_k, *xtc))


def templated(
    tokenizer: Any, system: str | None, question: str, begun: str | None = None, /, **more: Any
) -> Any:
    """A question in the chat template, after a system message; ``begun``: start of its answer."""
    said = [("system", system), ("user", question), ("assistant", begun)]
    messages = [{"role": role, "content": text} for role, text in said if text is not None]
    goes_on = begun is not None
    more = {"continue_final_message": goes_on, "add_generation_prompt": not goes_on} | more
    try:
        return tokenizer.apply_chat_template(messages, **more)
    except Exception as error:  # templates are programs that can raise anything
        raise ValueError(f"the model's chat template refuses the prompt: {error}") from error


def prompt_of(text: str) -> str:
    """The prompt, or for "-" all of standard input. Raises ValueError if that is not text in
    UTF-8."""
    if text != "-":
        return text
    read_whole_characters("strict")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: {error}") from error


def read_whole_characters(errors: str) -> None:
    """Read standard input as UTF-8 from here on; incomplete characters are errors, or replaced."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors=errors)


def say_summary(caches: Sequence[Any], model: Any, more: str = "") -> None:
    """The last line of a command: what the caches hold."""
    mx.eval([cache.state for cache in caches])  # with pending steps, all preallocated rows count
    settings = [cache.config for cache in evicting_caches(caches)]
    policies = dict.fromkeys(one.policy.name for one in settings if one.max_kv_size is not None)
    by = f"{' and '.join(policies)}{', ' if policies else ''}"
    print(f"KV cache: {by}{prompt_cache.summary(caches, model)}{ranks_of(model)}{more}")


def say_where_beyond(model: Any, caches: Sequence[Any]) -> bool:
    """Print a warning if the text is longer than the model's trained context."""
    seen = max((cache.offset for cache in evicting_caches(caches)), default=0)
    if said := prompt_cache.beyond_context(context_length(model), seen):
        print(said, file=sys.stderr)
    return bool(said)
