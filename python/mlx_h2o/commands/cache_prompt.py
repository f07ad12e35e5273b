"""`mlx_h2o cache_prompt`: read a prompt once, and save its cache for `generate`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.cache_prompt import setup_arg_parser
from mlx_lm.generate import generate_step

from ..lm.generate import load, make_prompt_cache, summary
from ..lm.prompt_cache import evicting_caches
from ..lm.routing import routing_for
from ..lm.saving import save_prompt_cache
from .options import add_eviction, config_of, explain

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Cache a prompt as the command line's arguments say; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    config = config_of(parser, args)
    tokenizer_config: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if args.eos_token is not None:
        tokenizer_config["eos_token"] = args.eos_token
    model, tokenizer = load(
        args.model,
        adapter_path=args.adapter_path,
        tokenizer_config=tokenizer_config,
        trust_remote_code=args.trust_remote_code,
    )
    try:
        caches = make_prompt_cache(model, config)
    except ValueError as error:  # a model that cannot be served, by name
        print(f"mlx_h2o cache_prompt: {error}", file=sys.stderr)
        return 1
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt = mx.array(_tokens(tokenizer, text))
    with routing_for(model, list(evicting_caches(caches))):
        # The last token is processed too, as mlx_lm does with max_tokens=0.
        for _ in generate_step(prompt, model, max_tokens=0, prompt_cache=caches):
            pass
        mx.eval([cache.state for cache in caches])
    metadata = {"model": args.model, "tokenizer_config": json.dumps(tokenizer_config)}
    save_prompt_cache(args.prompt_cache_file, caches, metadata, model=model)
    print(f"Prompt: {prompt.size} tokens")
    print(f"Peak memory: {mx.get_peak_memory() / 1e9:.3f} GB")
    print(f"KV cache: {config.policy}, {summary(caches)}")
    return 0


def _tokens(tokenizer: Any, text: str) -> Any:
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=False, continue_final_message=True
    )


def _parser() -> argparse.ArgumentParser:
    parser = cast(argparse.ArgumentParser, cast(Any, setup_arg_parser)())
    parser.prog = "mlx_h2o cache_prompt"
    parser.description = "Save the evicting cache of a prompt, for mlx_h2o generate."
    parser.set_defaults(quantized_kv_start=0)
    explain(parser, "quantized_kv_start", "Only 0: rows are quantised from the first on.")
    add_eviction(parser)
    return parser
