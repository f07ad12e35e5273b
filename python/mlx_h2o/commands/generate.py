"""`mlx_h2o generate`: text from a prompt."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import DEFAULT_MODEL

from ..lm.generate import generate, load, tokens_ahead
from ..lm.ranks import Ranks
from ..lm.saving import load_prompt_cache
from .models import (
    add_flags,
    loaded,
    prompt_of,
    sampler,
    say_summary,
    say_where_beyond,
)
from .options import CacheSettings, add_cache_flags, settings_of
from .parsing import OneLineParser, json_object, prose
from .together import together
from .watch import EVERY, Watch


def parser() -> argparse.ArgumentParser:
    """Of its flags."""
    found = OneLineParser("generate", "Write text from a prompt, with KV caches of a fixed size.")
    add_flags(found, "model adapter-path trust-remote-code quantize-activations prefill-step-size")
    found.add_argument(
        "--verbose", type=lambda text: text.lower() not in ("false", "f"), default=True,
        metavar="YES", help="false: print only the text",
    )  # fmt: skip
    text = found.add_argument_group("prompt")
    add_flags(text, "prompt system-prompt")
    text.add_argument(
        "--prefill-response", type=prose, metavar="TEXT", help="how the answer begins"
    )
    text.add_argument(
        "--ignore-chat-template", action="store_true", help="take the prompt as it is"
    )
    text.add_argument("--use-default-chat-template", action="store_true", help=argparse.SUPPRESS)
    text.add_argument(
        "--chat-template-config", type=json_object, default={}, metavar="JSON",
        help="for the chat template",
    )  # fmt: skip
    text.add_argument("--prompt-cache-file", metavar="FILE", help="of cache_prompt, to go on from")
    text.add_argument("--image", nargs="+", help=argparse.SUPPRESS)
    tokens = found.add_argument_group("tokens")
    add_flags(
        tokens,
        "max-tokens temp top-p min-p top-k xtc-probability xtc-threshold min-tokens-to-keep seed",
        max_tokens=100,
    )
    tokens.add_argument(
        "--extra-eos-token", nargs="+", default=(), metavar="TEXT", help="tokens that end it"
    )
    drafts = found.add_argument_group("speculative decoding")
    add_flags(drafts, "draft-model num-draft-tokens")
    add_cache_flags(found)
    return found


def run(arguments: Sequence[str]) -> int:
    """Run it with the command line's arguments; returns the exit status."""
    flags = parser()
    args = flags.parse_args(arguments)
    if args.image:
        flags.error("--image is not available in this version")
    with together(flags, args) as ranks:
        return _run(flags, args, ranks)


def _run(flags: argparse.ArgumentParser, args: argparse.Namespace, ranks: Ranks) -> int:
    drafted = args.num_draft_tokens if args.draft_model else 0
    settings = settings_of(flags, args, speculative=drafted)
    saved, tokenizer_config = _saved(args, settings)
    args.model = args.model or DEFAULT_MODEL
    text = prompt_of(args.prompt.replace("\\n", "\n").replace("\\t", "\t"))
    if args.seed is not None:
        mx.random.seed(args.seed)
    model, tokenizer = loaded(args, ranks, **tokenizer_config)
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    prompt, templated = _prompt(args, tokenizer, text)
    tokens = tokenizer.encode(prompt, add_special_tokens=not templated)
    draft = load(args.draft_model) if drafted else None
    if draft is not None and draft[1].vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"--draft-model has a tokenizer of {draft[1].vocab_size} tokens, expected "
            f"{tokenizer.vocab_size} as the model"
        )
    chooses = sampler(args, model, tokenizer)
    if saved:
        caches = load_prompt_cache(args.prompt_cache_file, model=model)
    else:
        both = model, draft and draft[0], tokens_ahead(tokens, args.max_tokens)
        caches = settings.fitted(*both).caches(*both)
    with Watch(after=EVERY) as watch:
        written = generate(
            model,
            tokenizer,
            tokens,
            args.verbose,
            max_tokens=args.max_tokens,
            sampler=chooses,
            prefill_step_size=args.prefill_step_size,
            prompt_cache=caches,
            prompt_progress_callback=lambda done, total: watch("reading", done, total),
            **{"draft_model": draft[0], "num_draft_tokens": drafted} if draft else {},
        )
    if not args.verbose:
        print(written)
    else:
        say_summary(caches, model)
    say_where_beyond(model, caches)
    return 0


def _saved(args: argparse.Namespace, settings: CacheSettings) -> tuple[bool, dict[str, Any]]:
    """Whether there is a saved prompt, whose model it is then, and how its tokenizer is made."""
    if args.prompt_cache_file is None:
        return False, {}
    if args.draft_model is not None:
        raise ValueError(
            "--draft-model with --prompt-cache-file: a saved prompt has no cache of the draft model"
        )
    if settings.given:
        raise ValueError("--prompt-cache-file brings its settings, found others beside it")
    _, metadata = load_prompt_cache(args.prompt_cache_file, return_metadata=True)
    of = metadata.get("model", args.model)
    if args.model not in (None, of):
        raise ValueError(
            f"--prompt-cache-file is of the model {of!r}, found --model {args.model!r}"
        )
    args.model = of
    said = metadata.get("tokenizer_config", "{}")
    try:
        return True, {**json.loads(said)}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{args.prompt_cache_file} has the tokenizer_config {said:.80}, expected an object in "
            "JSON"
        ) from error


def _prompt(args: argparse.Namespace, tokenizer: Any, text: str) -> tuple[str, bool]:
    """What the model reads, and whether it is in the chat template."""
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        if args.system_prompt or args.prefill_response:
            raise ValueError(
                "--system-prompt or --prefill-response is given, and no chat template to put it in"
            )
        return text, False
    begun = args.prefill_response is not None

    def templated(question: str, **more: Any) -> str:
        said = [("system", args.system_prompt), ("user", question)]
        said.append(("assistant", args.prefill_response))
        found: str = tokenizer.apply_chat_template(
            [{"role": role, "content": one} for role, one in said if one is not None],
            tokenize=False,
            continue_final_message=begun,
            add_generation_prompt=not begun,
            **more,
        )
        return found

    whole = templated(text, **args.chat_template_config)
    if args.prompt_cache_file is None:
        return whole, True
    # What stands before the question is in the file.
    return whole[templated("<query>", **args.chat_template_config).index("<query>") :], True
