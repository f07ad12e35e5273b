"""`mlx_h2o server`: one model over HTTP."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import logging
import socket
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..lm.fingerprint import fingerprint
from ..lm.generate import load
from ..lm.prompt_cache import budgets_of, evicting_caches, make_prompt_cache
from .models import add_flags
from .options import CacheSettings, add_cache_flags, settings_of
from .parsing import OneLineParser, json_object, nbytes, number
from .together import refuse_several

_LOG = logging.getLogger("mlx_h2o")


def run(arguments: Sequence[str]) -> int:
    """Serve until a signal ends it; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    refuse_several(parser)
    drafted = 0 if args.draft_model is None else args.num_draft_tokens
    if drafted and hasattr(args, "budgets"):
        parser.error("--budgets with --draft-model: its layers are not those of the file")
    settings = settings_of(parser, args, speculative=drafted)
    try:
        importlib.import_module("mlx_h2o.serving.listening")
        importlib.import_module("mlx_h2o.serving.http")
    except ImportError as error:
        parser.error(f"{error.name} is missing, expected pip install 'mlx-h2o[server]'")
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(message)s")
    store = _store(parser, args)
    try:
        return _serve(args, settings, store)
    finally:
        if store is not None:
            store.close()


def _serve(args: argparse.Namespace, settings: CacheSettings, store: Any) -> int:
    from ..serving.listening import listen

    with listen(args.host, args.port) as listener:  # a taken port is told before the model loads
        _serve_on(listener, args, settings, store)
    return 0


def _serve_on(
    listener: socket.socket, args: argparse.Namespace, settings: CacheSettings, store: Any
) -> None:
    from ..serving.engine import Engine
    from ..serving.http import Settings, make_app
    from ..serving.listening import serve
    from ..serving.memory import Memory, machine_bytes
    from ..serving.request import Limits
    from ..serving.sampling import Sampling
    from ..serving.snapshots import Snapshots

    tokenizer_config: dict[str, Any] = {"trust_remote_code": args.trust_remote_code or None}
    if args.chat_template:
        tokenizer_config["chat_template"] = args.chat_template
    model, tokenizer = load(
        args.model, adapter_path=args.adapter_path, tokenizer_config=tokenizer_config
    )
    models = [model] if args.draft_model is None else [model, load(args.draft_model)[0]]
    mx.eval([one.parameters() for one in models])
    make = _making(models, settings)
    limits = Limits(
        args.decode_concurrency, args.prompt_concurrency, args.max_queue, args.prefill_step_size,
        args.num_draft_tokens,
    )  # fmt: skip
    memory = Memory(
        models, make, args.memory or machine_bytes() * 3 // 4, limits.step,
        min(limits.prompts, limits.decode), limits.decode,
    )  # fmt: skip
    most = memory.free // 4 if args.prompt_cache_bytes is None else args.prompt_cache_bytes
    snapshots = Snapshots(most, args.prompt_cache_size)
    kept = None if store is None else (store, _name(models, make))
    engine = Engine(models, tokenizer, make, memory, snapshots, limits, kept)
    memory.apply()
    sampling = Sampling(args.temp, args.top_p, args.top_k, args.min_p)
    app = make_app(
        engine,
        Settings(
            args.model, sampling, args.max_tokens, args.chat_template_args, args.api_key,
            args.allowed_hosts, args.allowed_origins, args.max_body, args.grace,
        ),
    )  # fmt: skip
    _LOG.info(
        "%s on http://%s:%d, %s bytes beside the weights", args.model, *listener.getsockname()[:2],
        f"{memory.free:,}",
    )  # fmt: skip
    serve(app, engine, listener, args.grace)


def _making(models: list[Any], settings: CacheSettings) -> Any:
    """What makes caches of these settings, one list for each model."""
    settings = settings.fitted(*models)

    def make() -> list[list[Any]]:
        return [
            make_prompt_cache(
                model, settings.config, budgets=settings.budgets if model is models[0] else None,
                layers=settings.layers,
            )
            for model in models
        ]  # fmt: skip

    return make


def _name(models: list[Any], make: Any) -> str:
    """The same for the same weights and settings of caches."""
    caches = [one for own in make() for one in own]
    settings = [one.config for one in evicting_caches(caches)], budgets_of(caches)
    known = [fingerprint(model) for model in models]
    return " ".join([*known, hashlib.sha256(repr(settings).encode()).hexdigest()[:16]])


def _store(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Any:
    from ..serving.disk import PromptStore

    if args.cache_dir is None:
        return None
    if not args.cache_dir:
        parser.error("--cache-dir is empty, expected a directory")
    try:
        return PromptStore(args.cache_dir, args.cache_size)
    except FileExistsError:
        parser.error(f"--cache-dir: {args.cache_dir} is a file, expected a directory")
    except OSError as error:
        parser.error(f"--cache-dir: cannot write to {args.cache_dir}: {error.strerror}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        "server",
        "Serve one model over HTTP, as OpenAI's API does.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add_flags(parser, "model adapter-path trust-remote-code", model="demo")
    add("--host", default="127.0.0.1", help="where to listen")
    add("--port", type=number(0, 65535), default=8080, help="where to listen; 0: a free one")
    add("--api-key", help="what clients have to say")
    add("--allowed-hosts", type=_names, default=[], metavar="NAMES",
        help="names of this server, beside addresses and localhost; * for any")  # fmt: skip
    add("--allowed-origins", type=_names, default=[], metavar="ORIGINS",
        help="origins whose pages may ask, beside this machine's; * for any")  # fmt: skip
    add("--max-body", type=nbytes, default=1 << 26, metavar="BYTES", help="of a request")
    add("--grace", type=number(0, kind=float), default=30.0, metavar="SECONDS",
        help="that running answers have when the server is ended")  # fmt: skip
    add(
        "--log-level",
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="of the log",
    )
    asked = parser.add_argument_group("where a request does not say")
    add = asked.add_argument
    add("--temp", type=number(0, 100, float), default=0.0, help="sampling temperature; 0: greedy")
    add("--top-p", type=number(1e-9, 1, float), default=1.0, help="nucleus sampling")
    add("--top-k", type=number(0), default=0, help="likeliest tokens to choose from; 0: all")
    add("--min-p", type=number(0, 1, float), default=0.0, help="least probability, by the largest")
    add("--max-tokens", type=number(1), default=512, help="of an answer")
    add("--chat-template", help="a chat template instead of the model's")
    add("--chat-template-args", type=json_object, default={}, metavar="JSON",
        help='such as {"enable_thinking": false}')  # fmt: skip
    memory = parser.add_argument_group("memory and speed")
    add = memory.add_argument
    add("--memory", type=nbytes, metavar="BYTES",
        help="weights, caches and all else (default: three quarters of the machine's)")  # fmt: skip
    add("--decode-concurrency", type=number(1), default=32, help="requests answered together")
    add("--prompt-concurrency", type=number(1), default=8, help="prompts read together")
    add_flags(memory, "prefill-step-size")
    add("--max-queue", type=number(1), default=512, help="requests that may wait")
    add("--prompt-cache-size", type=number(0), default=1024, help="beginnings of prompts kept")
    add("--prompt-cache-bytes", type=nbytes, metavar="BYTES",
        help="of these (default: a quarter of what the weights leave)")  # fmt: skip
    add("--cache-dir", metavar="DIR", help="where prompts are kept for the next start")
    add(
        "--cache-size",
        type=nbytes,
        default=10**10,
        metavar="BYTES",
        help="of that directory",
    )
    add_flags(memory, "draft-model num-draft-tokens")
    add_cache_flags(parser)
    return parser
