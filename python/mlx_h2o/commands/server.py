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
from .flags import add_flags
from .options import CacheSettings, add_cache_flags, settings_of
from .parsing import OneLineParser, number

_LOG = logging.getLogger("mlx_h2o")


def run(arguments: Sequence[str]) -> int:
    """Serve until a signal ends it; returns the exit status."""
    flags = parser()
    args = flags.parse_args(arguments)
    drafted = 0 if args.draft_model is None else args.num_draft_tokens
    if drafted and hasattr(args, "budgets"):
        flags.error("--budgets with --draft-model: its layers are not those of the file")
    settings = settings_of(flags, args, speculative=drafted)
    try:
        importlib.import_module("mlx_h2o.serving.listening")
        importlib.import_module("mlx_h2o.serving.http")
    except ImportError as error:
        flags.error(f"{error.name} is missing, expected pip install 'mlx-h2o[server]'")
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(message)s")
    store = _store(flags, args)
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
            args.allowed_hosts, args.allowed_origins, args.max_body,
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


def _store(flags: argparse.ArgumentParser, args: argparse.Namespace) -> Any:
    from ..serving.disk import PromptStore

    if args.cache_dir is None:
        return None
    if not args.cache_dir:
        flags.error("--cache-dir is empty, expected a directory")
    try:
        return PromptStore(args.cache_dir, args.cache_size)
    except FileExistsError:
        flags.error(f"--cache-dir: {args.cache_dir} is a file, expected a directory")
    except OSError as error:
        flags.error(f"--cache-dir: cannot write to {args.cache_dir}: {error.strerror}")


def parser() -> argparse.ArgumentParser:
    """Of its flags."""
    found = OneLineParser("server", "Serve one model over HTTP, as OpenAI's API does.")
    names = "model adapter-path trust-remote-code host port api-key allowed-hosts allowed-origins "
    add_flags(found, names + "max-body grace log-level", model="demo")
    asked = found.add_argument_group("where a request does not say")
    add_flags(asked, "temp top-p top-k min-p")
    asked.add_argument(
        "--max-tokens", type=number(1), default=512, metavar="N", help="of an answer"
    )
    add_flags(asked, "chat-template chat-template-args")
    names = "memory decode-concurrency prompt-concurrency prefill-step-size max-queue "
    names += "prompt-cache-size prompt-cache-bytes cache-dir cache-size "
    room = found.add_argument_group("memory and speed")
    add_flags(room, names + "draft-model num-draft-tokens")
    add_cache_flags(found)
    return found
