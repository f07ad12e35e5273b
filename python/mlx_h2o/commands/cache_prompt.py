"""`mlx_h2o cache_prompt`: read a prompt once, and save its cache."""

import argparse
import json
import time
from functools import partial
from typing import Any

import mlx.core as mx

from ..lm.files import check_writable
from ..lm.generate import read_prompt
from ..lm.ranks import Ranks
from ..lm.saving import save_prompt_cache, with_suffix
from . import options
from .flags import cache_parser
from .parsing import OneLineParser, checked
from .watch import Watch


def parser() -> OneLineParser:
    names = "model adapter-path trust-remote-code prefill-step-size prompt eos-token"
    file = checked(str, lambda file: check_writable(with_suffix(file)))
    return cache_parser(
        "Read a prompt and save its cache, for generate --prompt-cache-file.",
        "model prompt prompt-cache-file max-kv-bytes max-kv-size",
        {"": f"{names} prompt-cache-file"}, model="mlx_model", prompt=...,
        prompt_cache_file=(file, ..., "FILE", "the file to write"),
    )  # fmt: skip


def run(args: argparse.Namespace, settings: options.CacheSettings, ranks: Ranks) -> None:
    """Read the prompt, and write the file."""
    text = options.prompt_of(args.prompt)
    config = {"trust_remote_code": args.trust_remote_code}
    model, tokenizer = options.loaded(args)
    if args.eos_token is not None:
        if args.eos_token not in tokenizer.get_vocab():
            raise ValueError(f"--eos-token {args.eos_token!r} is not a token of {args.model}")
        tokenizer.eos_token = config["eos_token"] = args.eos_token
    chats = tokenizer.has_chat_template
    opened: Any = {"add_generation_prompt": False, "continue_final_message": True}
    tokens = options.templated(tokenizer, None, text, **opened) if chats else tokenizer.encode(text)
    caches = settings.fitted(model).caches(model)
    began = time.perf_counter()
    with Watch() as watch:
        read_prompt(model, caches, tokens, args.prefill_step_size, partial(watch, "reading"))
    speed = len(tokens) / (time.perf_counter() - began)
    print(f"Processed {len(tokens):6d} tokens ({speed:6.2f} tok/s)")
    print(f"Peak memory: {mx.get_peak_memory() / 1e9:.3f} GB")
    metadata = {"model": args.model, "tokenizer_config": json.dumps(config)}
    save_prompt_cache(args.prompt_cache_file, caches, metadata, model=model)
    print(f"Saved {with_suffix(args.prompt_cache_file)}")
    options.say_summary(caches, model)
    options.say_where_beyond(model, caches)
