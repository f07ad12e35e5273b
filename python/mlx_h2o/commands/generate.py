"""`mlx_h2o generate`: text from a prompt."""

import argparse
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import DEFAULT_MODEL

from ..lm.generate import generate, load, stream_generate, tokens_ahead
from ..lm.generation_checks import check_drafts
from ..lm.models import stock_caches
from ..lm.ranks import Ranks
from ..lm.saving import load_prompt_cache, saved_texts
from . import options
from .flags import cache_parser
from .parsing import OneLineParser, json_object
from .watch import Watch


def parser() -> OneLineParser:
    groups = {
        "": "model adapter-path trust-remote-code pipeline quantize-activations prefill-step-size "
        "verbose",
        "prompt": "prompt system-prompt prefill-response ignore-chat-template "
        "use-default-chat-template chat-template-config prompt-cache-file image",
        "tokens": "max-tokens temp top-p min-p top-k xtc-probability xtc-threshold "
        "min-tokens-to-keep seed extra-eos-token",
        "speculative decoding": "draft-model num-draft-tokens",
    }
    return cache_parser(
        "Generate text from a prompt, with KV caches of a fixed size.",
        "model prompt max-tokens max-kv-bytes max-kv-size", groups, max_tokens=100,
    )  # fmt: skip


def run(args: argparse.Namespace, settings: options.CacheSettings, ranks: Ranks) -> None:
    """Write the text."""
    if args.image:
        raise ValueError("--image is not available in this version")
    saved = args.prompt_cache_file is not None
    tokenizer_config = _of_saved(args, settings.given) if saved else {}
    args.model = args.model or DEFAULT_MODEL
    text = options.prompt_of(args.prompt.replace("\\n", "\n").replace("\\t", "\t"))
    if args.seed is not None:
        mx.random.seed(args.seed)
    model, tokenizer = options.loaded(args, ranks, **tokenizer_config)
    for token in args.extra_eos_token:
        if token not in (known := tokenizer.get_vocab()) and token not in map(str, known.values()):
            raise ValueError(f"--extra-eos-token {token!r} is not a token of {args.model}")
        tokenizer.add_eos_token(token)
    prompt, templated = _prompt(args, tokenizer, text)
    tokens = tokenizer.encode(prompt, add_special_tokens=not (templated or saved))
    draft, written, ahead = None, "", tokens_ahead(args.max_tokens, tokens)
    given: dict[str, Any] = {name: vars(args)[name] for name in ("max_tokens", "prefill_step_size")}
    if args.draft_model:
        draft, other = load(args.draft_model)
        if other.vocab_size != (size := tokenizer.vocab_size):
            said = f"--draft-model has a tokenizer of {other.vocab_size} tokens"
            raise ValueError(f"{said}, expected {size} as the model")
        check_drafts("generate", stock_caches([model, draft]), model, ahead)
        given |= {"draft_model": draft, "num_draft_tokens": args.num_draft_tokens}
    given["sampler"] = options.sampler(args, model, tokenizer)
    if saved:
        caches = load_prompt_cache(args.prompt_cache_file, model=model)
    else:
        caches = settings.fitted(model, draft, ahead).caches(model, draft, ahead)
    with Watch() as watch:
        given |= {"prompt_cache": caches, "prompt_progress_callback": partial(watch, "reading")}
        if args.verbose:
            generate(model, tokenizer, tokens, True, **given)
        else:
            for one in stream_generate(model, tokenizer, tokens, **given):
                watch("writing", done := one.generation_tokens, max(done, args.max_tokens))
                written += one.text
    if not args.verbose:
        print(written)
    else:
        options.say_summary(caches, model)
    options.say_where_beyond(model, caches)


def _of_saved(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer's settings in a saved prompt, whose model becomes ``args.model``."""
    for name in ("draft-model", "system-prompt"):
        if vars(args)[name.replace("-", "_")] is not None:
            raise ValueError(f"--{name} with --prompt-cache-file: there is none in a saved prompt")
    if given:
        raise ValueError(f"--prompt-cache-file brings its settings, found {', '.join(given)}")
    metadata = saved_texts(args.prompt_cache_file)
    of = metadata.get("model", args.model)
    if args.model not in (None, of):
        said = f"--prompt-cache-file is of the model {of!r}"
        raise ValueError(f"{said}, found --model {args.model!r}")
    args.model = of
    try:
        return json_object(metadata.get("tokenizer_config", "{}"))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{args.prompt_cache_file} has a tokenizer_config: {error}") from error


def _prompt(args: argparse.Namespace, tokenizer: Any, text: str) -> tuple[str, bool]:
    """The text that the model reads, and whether it is in the chat template."""
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        if args.system_prompt or args.prefill_response:
            beside = "--system-prompt or --prefill-response is given"
            raise ValueError(f"{beside}, and no chat template to put it in")
        return text, False
    said = partial(options.templated, tokenizer, args.system_prompt)
    more = args.chat_template_config | {"tokenize": False}
    whole: str = said(text, args.prefill_response, **more)
    if args.prompt_cache_file is None:
        return whole, True
    # The file already holds what comes before the question.
    return whole[said("<query>", args.prefill_response, **more).index("<query>") :], True
