"""mlx_lm's server, with caches that evict."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import types
from collections.abc import Sequence
from typing import Any

from ..lm.hosting import hosting
from ..lm.prompt_store import PromptStore
from ..lm.replacements import PATCHES, always
from ..lm.sizing import parsed_bytes
from ..lm.upstream import target
from .options import add_cache_flags, settings_of
from .parsing import OneLineParser, checked, folder, in_flags, model_path, nbytes, number


class _TheirParser(OneLineParser):
    """For mlx_lm's server: values are checked as they are read."""

    def __init__(self, **given: Any) -> None:
        super().__init__("server", given["description"])

    def add_argument(self, *names: Any, **given: Any) -> argparse.Action:
        for name in names:
            if name in _READ:
                given["type"] = _READ[name]
        return super().add_argument(*names, **given)


_READ = {
    flag: reading
    for reading, flags in (
        (number(0, kind=float), "--temp"),
        (number(0, 1, float), "--top-p --min-p"),
        (number(0), "--top-k --prompt-cache-size"),
        (number(1), "--prompt-concurrency --decode-concurrency --prefill-step-size --max-tokens"),
        (number(0, 65535), "--port"),
        (nbytes, "--prompt-cache-bytes"),
        (checked(str, lambda text: {**json.loads(text)}), "--chat-template-args"),
        (folder, "--adapter-path"),
    )
    for flag in flags.split()
}


def run(arguments: Sequence[str]) -> int:
    """Run mlx_lm's server with the arguments that are not ours; the exit status."""
    parser = _parser()
    args, others = parser.parse_known_args(arguments)
    if args.model is not None:
        others += ["--model", args.model]
    drafted = 0
    if args.draft_model is not None:
        if hasattr(args, "budgets"):
            parser.error("--budgets with --draft-model: its layers are not those of the file")
        drafted = args.num_draft_tokens
        others += ["--draft-model", args.draft_model, "--num-draft-tokens", str(drafted)]
    settings = settings_of(parser, args, speculative=drafted)
    if "-h" in others or "--help" in others:
        print(parser.format_help())
        print("mlx_lm's own options; where both have one, the above holds:\n")
    module = importlib.import_module("mlx_lm.server")
    store = _store(parser, args)
    before = sys.argv
    sys.argv = ["mlx_h2o server", *others]
    try:
        given = settings.config, settings.budgets, settings.layers, settings.sized
        targets = [target("server", "argparse", always(_ARGPARSE))]
        with hosting(*given, store=store), PATCHES.replaced(targets):
            module.main()
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # such as a model or a file that cannot be served
        print(f"mlx_h2o server: {in_flags(str(error))}", file=sys.stderr)
        return 2
    finally:
        sys.argv = before
        if store is not None:
            store.close()
    return 0


def _store(parser: argparse.ArgumentParser, args: argparse.Namespace) -> PromptStore | None:
    if args.cache_dir is None:
        return None
    try:
        size = parsed_bytes(args.cache_size)
    except ValueError as error:
        parser.error(f"--cache-size: {error}")
    try:
        return PromptStore(args.cache_dir, size)
    except FileExistsError:
        parser.error(f"--cache-dir: {args.cache_dir} is a file, expected a directory")
    except OSError as error:
        parser.error(f"--cache-dir: cannot write to {args.cache_dir}: {error.strerror}")


def _parser() -> argparse.ArgumentParser:
    # What is not ours is mlx_lm's.
    parser = OneLineParser(
        "server", "mlx_lm's server, with KV caches of a fixed size.", add_help=False,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument(
        "--model", type=model_path, help="a directory, a name on the hub, or demo, the model in "
        "this package",
    )  # fmt: skip
    add_cache_flags(parser)
    kept = parser.add_argument_group("prompt caches that survive a restart")
    kept.add_argument("--cache-dir", metavar="DIR", help="where to keep them (default: nowhere)")
    kept.add_argument(
        "--cache-size", metavar="BYTES", default="10GB",
        help="size of the directory; the least recently used go (default: %(default)s)",
    )  # fmt: skip
    drafts = parser.add_argument_group("speculative decoding")
    drafts.add_argument(
        "--draft-model", type=model_path, metavar="MODEL", help="a small model that proposes tokens"
    )
    drafts.add_argument(
        "--num-draft-tokens", type=number(1), default=3, metavar="N",
        help="tokens it proposes at a time (default: %(default)s)",
    )  # fmt: skip
    return parser


_ARGPARSE = types.SimpleNamespace(**vars(argparse) | {"ArgumentParser": _TheirParser})
