"""`mlx_h2o generate`: mlx_lm's command of this name with a cache that evicts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import DEFAULT_MODEL, setup_arg_parser
from mlx_lm.sample_utils import make_sampler

from ..config import H2OConfig
from ..lm.generate import load, make_prompt_cache, stream_generate, summary
from ..lm.prompt_cache import evicting_caches
from ..lm.saving import load_prompt_cache
from .options import add_eviction, config_of, explain

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Generate from the command line's arguments; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.image:
        parser.error("--image is not available in this version")
    drafted = 0 if args.draft_model is None else args.num_draft_tokens
    config = config_of(parser, args, speculative=drafted)
    try:
        return _generate(args, config)
    except (OSError, ValueError) as error:  # a model that cannot be served, a file of another one
        print(f"mlx_h2o generate: {error}", file=sys.stderr)
        return 1


def _generate(args: argparse.Namespace, config: H2OConfig) -> int:
    if args.seed is not None:
        mx.random.seed(args.seed)
    caches, metadata = _saved(args, config)
    tokenizer_config = json.loads(metadata.get("tokenizer_config", "{}"))
    model, tokenizer = load(
        args.model or metadata.get("model") or DEFAULT_MODEL,
        adapter_path=args.adapter_path,
        tokenizer_config=tokenizer_config | {"trust_remote_code": args.trust_remote_code},
        model_config={"quantize_activations": args.quantize_activations},
        trust_remote_code=args.trust_remote_code,
    )
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    if caches is not None:  # once more, now that there is a model to compare it with
        caches = load_prompt_cache(args.prompt_cache_file, model=model)
    else:
        caches = make_prompt_cache(model, config, budgets=args.budgets)
    draft_model = _draft_model(args, tokenizer)
    if draft_model is not None:
        caches = caches + make_prompt_cache(draft_model, config)
    response = None
    for response in stream_generate(
        model,
        tokenizer,
        _prompt(args, tokenizer, suffix=args.prompt_cache_file is not None),
        max_tokens=args.max_tokens,
        sampler=_sampler(args, tokenizer),
        prefill_step_size=args.prefill_step_size,
        prompt_cache=caches,
        draft_model=draft_model,
        num_draft_tokens=args.num_draft_tokens,
    ):
        print(response.text, end="", flush=True)
    print()
    if args.verbose and response is not None:
        print("=" * 10)
        print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
        print(
            f"Generation: {response.generation_tokens} tokens, "
            f"{response.generation_tps:.3f} tokens-per-sec"
        )
        print(f"Peak memory: {response.peak_memory:.3f} GB")
        policy = next(evicting_caches(caches)).config.policy
        print(f"KV cache: {policy}, {summary(caches)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = cast(argparse.ArgumentParser, cast(Any, setup_arg_parser)())
    parser.prog = "mlx_h2o generate"
    parser.description = (
        "Generate text with a KV cache that evicts rows. --model demo is a small model that comes "
        "with the package."
    )
    parser.set_defaults(max_kv_size=H2OConfig.max_kv_size, quantized_kv_start=0)
    explain(parser, "quantized_kv_start", "Only 0: rows are quantised from the first on.")
    explain(parser, "prompt_cache_file", "A file of mlx_h2o cache_prompt, settings included.")
    add_eviction(parser)
    parser.add_argument(
        "--budgets",
        metavar="FILE",
        help="a budget for each layer, of a file that `mlx_h2o profile` wrote",
    )
    return parser


def _saved(args: argparse.Namespace, config: H2OConfig) -> tuple[Any, dict[str, str]]:
    """The prompt cache that a flag names, or None, and what was saved with it."""
    if args.prompt_cache_file is None:
        return None, {}
    if args.draft_model is not None:
        raise ValueError(
            "--draft-model with --prompt-cache-file: a saved prompt has no cache of the draft model"
        )
    if config != H2OConfig() or args.budgets is not None:
        raise ValueError("--prompt-cache-file brings its settings, found others beside it")
    caches, metadata = load_prompt_cache(args.prompt_cache_file, return_metadata=True)
    if args.model not in (None, metadata.get("model", args.model)):
        raise ValueError(
            f"--prompt-cache-file is of the model {metadata['model']!r}, found --model "
            f"{args.model!r}"
        )
    return caches, metadata


def _draft_model(args: argparse.Namespace, tokenizer: Any) -> Any:
    if args.draft_model is None:
        return None
    model, its_tokenizer = load(args.draft_model)
    if its_tokenizer.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"--draft-model has a vocabulary of {its_tokenizer.vocab_size} tokens, expected "
            f"{tokenizer.vocab_size} as the model"
        )
    return model


def _prompt(args: argparse.Namespace, tokenizer: Any, *, suffix: bool) -> Any:
    """The prompt's token ids, through the chat template where the tokenizer has one.

    ``suffix``: what the template puts before the prompt is in the saved cache.
    """
    text = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    text = sys.stdin.read() if text == "-" else text
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if args.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    prefilled = args.prefill_response is not None
    if prefilled:
        messages.append({"role": "assistant", "content": args.prefill_response})

    def formatted() -> str:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                continue_final_message=prefilled,
                add_generation_prompt=not prefilled,
                **json.loads(args.chat_template_config or "{}"),
            )
        )

    whole = formatted()
    if suffix:
        asking = next(message for message in messages if message["role"] == "user")
        asking["content"] = "<query>"
        whole = whole[formatted().index("<query>") :]
    return tokenizer.encode(whole, add_special_tokens=False)


def _sampler(args: argparse.Namespace, tokenizer: Any) -> Any:
    return make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )
