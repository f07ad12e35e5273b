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

from .. import policies
from ..config import H2OConfig
from ..generate import load, make_prompt_cache, stream_generate, summary

__all__ = ["run"]

# Flags of mlx_lm that would be without effect or wrong here, and their values when not given.
_NOT_YET = {"draft_model": None, "prompt_cache_file": None, "image": ()}


def run(arguments: Sequence[str]) -> int:
    """Generate from the command line's arguments; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    for name, absent in _NOT_YET.items():
        if getattr(args, name) != absent:
            parser.error(f"--{name.replace('_', '-')} is not available in this version")
    if args.quantized_kv_start:
        parser.error("--quantized-kv-start must be 0: rows are quantised from the first on")
    try:
        config = _config(args)
    except ValueError as error:
        parser.error(str(error))
    if args.seed is not None:
        mx.random.seed(args.seed)
    model, tokenizer = load(
        args.model or DEFAULT_MODEL,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        model_config={"quantize_activations": args.quantize_activations},
        trust_remote_code=args.trust_remote_code,
    )
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    try:
        caches = make_prompt_cache(model, config)
    except ValueError as error:  # a model that cannot be served, by name
        print(f"mlx_h2o generate: {error}", file=sys.stderr)
        return 1
    response = None
    for response in stream_generate(
        model,
        tokenizer,
        _prompt(args, tokenizer),
        max_tokens=args.max_tokens,
        sampler=_sampler(args, tokenizer),
        prefill_step_size=args.prefill_step_size,
        prompt_cache=caches,
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
        print(f"KV cache: {config.policy}, {summary(caches)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = cast(argparse.ArgumentParser, cast(Any, setup_arg_parser)())
    parser.prog = "mlx_h2o generate"
    parser.description = (
        "Generate text with a KV cache that evicts rows. --model demo is a small model that comes "
        "with the package."
    )
    defaults = H2OConfig()
    parser.set_defaults(max_kv_size=defaults.max_kv_size, quantized_kv_start=0)
    _explain(parser, "quantized_kv_start", "Only 0: rows are quantised from the first on.")
    ours = parser.add_argument_group(
        "eviction", f"--max-kv-size is {defaults.max_kv_size} where it is not given"
    )
    ours.add_argument(
        "--policy",
        choices=policies.names(),
        default=defaults.policy,
        help="what decides which rows stay (default: %(default)s)",
    )
    ours.add_argument(
        "--sink-size",
        type=int,
        default=defaults.sink_size,
        help="first rows that always stay (default: %(default)s)",
    )
    ours.add_argument("--heavy-size", type=int, help="rows kept by score (default: half)")
    ours.add_argument("--recent-size", type=int, help="newest rows that stay (default: the rest)")
    ours.add_argument(
        "--decay",
        type=float,
        default=defaults.decay,
        help="decay of the moving average of scores (default: %(default)s)",
    )
    ours.add_argument(
        "--evict-every",
        type=int,
        default=defaults.evict_every,
        help="tokens per eviction (default: %(default)s)",
    )
    ours.add_argument(
        "--shared-heads",
        action="store_true",
        help="one choice of rows for all heads of a layer, by the mean of their ranks",
    )
    ours.add_argument(
        "--random-seed",
        type=int,
        default=defaults.random_seed,
        help="of the policy random (default: %(default)s)",
    )
    ours.add_argument(
        "--v-bits",
        type=int,
        help="bits of the values, where they differ from --kv-bits, those of the keys",
    )
    ours.add_argument(
        "--light-bits",
        type=int,
        help="mixed precision: bits of the rows that rank in the lower half",
    )
    ours.add_argument(
        "--dense-size",
        type=int,
        help="newest rows that are not quantised (default: 32 with --light-bits, else 0)",
    )
    return parser


def _explain(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Replace the help of one of mlx_lm's flags, whose meaning here is narrower."""
    for action in parser._actions:
        if action.dest == name:
            action.help = text


def _config(args: argparse.Namespace) -> H2OConfig:
    return H2OConfig(
        **{name: getattr(args, name) for name in H2OConfig.setting_names() if hasattr(args, name)}
    )


def _prompt(args: argparse.Namespace, tokenizer: Any) -> Any:
    """The prompt's token ids, through the chat template where the tokenizer has one."""
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
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        continue_final_message=prefilled,
        add_generation_prompt=not prefilled,
        **json.loads(args.chat_template_config or "{}"),
    )
    return tokenizer.encode(text, add_special_tokens=False)


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
