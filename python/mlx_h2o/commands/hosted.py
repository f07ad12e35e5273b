"""mlx_lm's generate, chat, cache_prompt and benchmark, with caches that evict."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import mlx_lm
from mlx_lm.generate import DEFAULT_MODEL, setup_arg_parser

from ..config import H2OConfig
from ..lm.checks import vocabulary
from ..lm.generate import check_path, generate, summary, tokens_ahead
from ..lm.hosting import Host, hosting
from ..lm.prompt_cache import beyond_context, context_length, evicting_caches, tokens_seen
from ..lm.replacements import PATCHES, always
from ..lm.saving import load_prompt_cache, save_prompt_cache
from ..lm.upstream import target
from .options import OneLineParser, add_cache_flags, in_flags, number, settings_of


def run(command: str, arguments: Sequence[str]) -> int:
    """Run mlx_lm's command of this name with the arguments that are not ours; the exit status."""
    parser = _parser(command)
    args, others = parser.parse_known_args(arguments)
    if getattr(args, "image", None):
        parser.error("--image is not available in this version")
    if getattr(args, "seed", None) is not None:
        others += ["--seed", str(args.seed)]
    if args.model is not None:
        others += ["--model", args.model]
        _check_model(parser, args.model)
    drafted = 0
    if args.draft_model is not None:
        _check_model(parser, args.draft_model)
        drafted = args.num_draft_tokens
        others += ["--draft-model", args.draft_model, "--num-draft-tokens", str(drafted)]
    settings = settings_of(parser, args, speculative=drafted)
    if "-h" in others or "--help" in others:
        print(parser.format_help())
        print("mlx_lm's own options; where both have one, the above holds:\n")
    module = importlib.import_module(f"mlx_lm.{command}")
    if isinstance(sys.stdin, io.TextIOWrapper):  # else halves of characters reach the tokenizer
        sys.stdin.reconfigure(errors="replace" if command == "chat" else "strict")
    before = sys.argv
    sys.argv = [f"mlx_h2o {command}", *others]
    try:
        with hosting(*settings) as host:
            ours = {"argparse": _ARGPARSE} | _REPLACED.get(command, _nothing)(host, args.model)
            targets = [target(command, name, always(each)) for name, each in ours.items()]
            with PATCHES.replaced(targets):
                module.main()
    except BrokenPipeError:
        raise
    except EOFError:  # Ctrl-D ends a chat
        return 0
    except (OSError, ValueError) as error:  # such as a model or a file that cannot be served
        where = "standard input: " if isinstance(error, UnicodeDecodeError) else ""
        print(f"mlx_h2o {command}: {where}{in_flags(str(error))}", file=sys.stderr)
        return 2
    finally:
        sys.argv = before
    return 0


def _check_model(parser: argparse.ArgumentParser, model: str) -> None:
    """Before anything runs."""
    try:
        check_path(model)
    except ValueError as error:
        parser.error(str(error))


def _seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed < 2**64:
        raise argparse.ArgumentTypeError(f"{seed} is no seed, expected 0 to 2^64 - 1")
    return seed


def _parser(command: str) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=f"mlx_h2o {command}",
        description=f"mlx_lm's {command}, with KV caches of a fixed size.",
        add_help=False,
        allow_abbrev=False,  # what is not ours is mlx_lm's
    )
    parser.add_argument(
        "--model", help="a directory, a name on the hub, or demo, the model in this package"
    )
    add_cache_flags(parser)
    if command == "generate":
        parser.add_argument("--image", nargs="+", help="not available in this version")
    if command in ("generate", "chat"):
        parser.add_argument("--seed", type=_seed, help="random seed (default: mlx_lm's)")
    drafts = parser.add_argument_group("speculative decoding (generate)")
    drafts.add_argument("--draft-model", metavar="MODEL", help="a small model that proposes tokens")
    drafts.add_argument(
        "--num-draft-tokens", type=number(1), default=3, metavar="N",
        help="tokens it proposes at a time (default: %(default)s)",
    )  # fmt: skip
    return parser


def _generation(host: Host, model: str | None) -> dict[str, Callable[..., Any]]:
    """What `generate` calls of ours: caches for both models, and those of a file."""
    file = ""

    def load(file_name: str, return_metadata: bool = True) -> tuple[list[Any], dict[str, str]]:
        nonlocal file
        file = file_name
        if host.config.speculative:
            raise ValueError(
                "--draft-model with --prompt-cache-file: a saved prompt has no cache of the draft "
                "model"
            )
        if host.config != H2OConfig() or host.budgets or host.sized:
            raise ValueError("--prompt-cache-file brings its settings, found others beside it")
        caches, metadata = load_prompt_cache(file, return_metadata=True)
        of = metadata.setdefault("model", model or DEFAULT_MODEL)
        if model not in (None, of):
            raise ValueError(f"--prompt-cache-file is of the model {of!r}, found --model {model!r}")
        return caches, {"tokenizer_config": "{}"} | metadata

    def generating(
        loaded: Any, tokenizer: Any, prompt: Any, *, verbose: bool, draft_model: Any, **given: Any
    ) -> str:
        for name in ("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start"):
            del given[name]  # mlx_lm's defaults: the caches bring their settings
        _check_asked(loaded, tokenizer)
        if given.pop("prompt_cache") is not None:
            caches = load_prompt_cache(file, model=loaded)  # now that there is one to compare
        else:
            ahead = tokens_ahead(prompt, given.get("max_tokens", -1))
            caches = host.caches(loaded, draft_model, ahead)
        text = generate(
            loaded,
            tokenizer,
            prompt,
            verbose,
            prompt_cache=caches,
            draft_model=draft_model,
            **given,
        )
        if verbose:
            _print_summary(caches, loaded)
        _say_where_beyond(loaded, caches)
        return text

    return {"load_prompt_cache": load, "generate": generating}


def _check_asked(model: Any, tokenizer: Any) -> None:
    """What `generate` was asked for, against the model."""
    parser: Any = setup_arg_parser
    asked = parser().parse_args()
    if asked.top_k >= (known := vocabulary(model)):
        raise ValueError(f"--top-k is {asked.top_k}, expected fewer than all {known} tokens")
    templated = tokenizer.has_chat_template and not asked.ignore_chat_template
    if not templated and (asked.system_prompt or asked.prefill_response):
        raise ValueError(
            "--system-prompt or --prefill-response is given, and no chat template to put it in"
        )


def _saving(host: Host, model: str | None) -> dict[str, Callable[..., Any]]:
    """What `cache_prompt` calls of ours: files that say what they were made with."""

    def save(file_name: str, cache: list[Any], metadata: dict[str, str]) -> None:
        save_prompt_cache(file_name, cache, metadata, model=host.model())
        _print_summary(cache, host.model())
        _say_where_beyond(host.model(), cache)

    return {"save_prompt_cache": save}


def _talking(host: Host, model: str | None) -> dict[str, Callable[..., Any]]:
    """What `chat` calls of ours: a word once it is longer than the model is made for."""
    said = False

    def stream_generate(loaded: Any, *args: Any, prompt_cache: list[Any], **given: Any) -> Any:
        nonlocal said
        yield from mlx_lm.stream_generate(loaded, *args, prompt_cache=prompt_cache, **given)
        said = said or _say_where_beyond(loaded, prompt_cache)

    return {"stream_generate": stream_generate}


def _print_summary(caches: list[Any], model: Any) -> None:
    settings = [cache.config for cache in evicting_caches(caches)]
    policies = dict.fromkeys(one.policy for one in settings if one.max_kv_size is not None)
    print(f"KV cache: {' and '.join(policies)}{', ' if policies else ''}{summary(caches, model)}")


def _say_where_beyond(model: Any, caches: list[Any]) -> bool:
    """One line where the text is longer than the model is made for."""
    said = beyond_context(context_length(model), tokens_seen(caches))
    if said:
        print(said, file=sys.stderr)
    return bool(said)


def _nothing(host: Host, model: str | None) -> dict[str, Callable[..., Any]]:
    return {}


_ARGPARSE = types.SimpleNamespace(**vars(argparse) | {"ArgumentParser": OneLineParser})
"""For mlx_lm's commands: a mistake is told in one line."""

_REPLACED = {"generate": _generation, "cache_prompt": _saving, "chat": _talking}
