"""`mlx_h2o server`: one model over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import logging
import signal
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..lm.fingerprint import fingerprint
from ..lm.generate import load
from ..lm.prompt_cache import budgets_of, evicting_caches
from ..lm.ranks import Ranks
from .flags import add_cache_flags, add_flags
from .models import loaded
from .options import CacheSettings, settings_of
from .parsing import OneLineParser, number
from .together import together

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
        importlib.import_module("mlx_h2o.serving.http")
        importlib.import_module("mlx_h2o.serving.listening")
    except ImportError as error:
        flags.error(f"{error.name} is missing, expected pip install 'mlx-h2o[server]'")
    with together(flags, args) as ranks:
        logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(message)s")
        _serve(args, settings, ranks)
    return 0


def _serve(args: argparse.Namespace, settings: CacheSettings, ranks: Ranks) -> None:
    from ..serving.disk import PromptStore
    from ..serving.engine import Engine
    from ..serving.http import Settings, make_app
    from ..serving.listening import listen, serve
    from ..serving.memory import Memory, usual_bytes
    from ..serving.request import Limits
    from ..serving.sampling import Sampling
    from ..serving.snapshots import Snapshots

    with contextlib.ExitStack() as stack:
        # A port that is taken is told before the model is loaded.
        listener = None if ranks.rank else stack.enter_context(listen(args.host, args.port))
        template = {"chat_template": args.chat_template} if args.chat_template else {}
        model, tokenizer = loaded(args, ranks, **template)
        models = [model] if args.draft_model is None else [model, load(args.draft_model)[0]]
        mx.eval([one.parameters() for one in models])
        make = partial(_made, models, settings.fitted(*models))
        step, limit = args.prefill_step_size, args.memory or usual_bytes()
        memory = Memory(models, make, limit, step, args.prompt_concurrency, args.decode_concurrency)
        limits = Limits(memory.decode, memory.prompts, args.max_queue, step, args.num_draft_tokens)
        if memory.lowered:
            said = "%s bytes: room to read %d prompts and make %d answers at a time"
            _LOG.warning(said, f"{limit:,}", memory.prompts, memory.decode)
        most = memory.free // 4 if args.prompt_cache_bytes is None else args.prompt_cache_bytes
        snapshots = Snapshots(most, args.prompt_cache_size, ranks)
        store: PromptStore | None = None
        if args.cache_dir is not None:
            store = PromptStore(args.cache_dir, args.cache_size, _name(models, make))
            stack.enter_context(contextlib.closing(store))
        engine = Engine(models, tokenizer, make, memory, snapshots, limits, store)
        memory.apply()
        for one in (signal.SIGINT, signal.SIGTERM):  # uvicorn hears of them, on the first rank
            signal.signal(one, signal.SIG_IGN)
        sampling = Sampling(args.temp, args.top_p, args.top_k, args.min_p)
        asked = Settings(
            args.model, sampling, args.max_tokens, args.chat_template_args, args.api_key,
            args.allowed_hosts, args.allowed_origins, args.max_body,
        )  # fmt: skip
        if listener is None:
            engine.ended.wait()
        else:
            where = args.model, *listener.getsockname()[:2], f"{memory.free:,}"
            _LOG.info("%s on http://%s:%d, %s bytes beside the weights%s", *where, ranks)
            serve(make_app(engine, asked), engine, listener, args.grace)
        if engine.error is not None:
            raise ValueError(f"the engine has ended: {engine.error}")


def _made(models: list[Any], settings: CacheSettings) -> list[list[Any]]:
    """New caches, one list for each model."""
    return [settings.caches(model) for model in models]


def _name(models: list[Any], make: Any) -> str:
    """The same for the same weights and settings of caches."""
    caches = [one for own in make() for one in own]
    settings = [one.config for one in evicting_caches(caches)], budgets_of(caches)
    known = [fingerprint(model) for model in models]
    return " ".join([*known, hashlib.sha256(repr(settings).encode()).hexdigest()[:16]])


def parser() -> argparse.ArgumentParser:
    """Of its flags."""
    said = "Serve one model over HTTP, as OpenAI's API does."
    first = "model port memory max-kv-bytes max-kv-size"
    found = OneLineParser("server", said, first, allow_abbrev=False)
    names = "model adapter-path trust-remote-code host port api-key allowed-hosts allowed-origins "
    add_flags(found, names + "max-body grace log-level", model="demo")
    asked = found.add_argument_group("defaults of requests")
    add_flags(asked, "temp top-k min-p")
    for name, reading, default, said in (
        ("--top-p", number(1e-9, 1, float), 1.0, "of the likeliest tokens with this sum"),
        ("--max-tokens", number(1), 512, "of an answer"),
    ):
        asked.add_argument(name, type=reading, default=default, metavar="N", help=said)
    add_flags(asked, "chat-template chat-template-args")
    names = "memory decode-concurrency prompt-concurrency prefill-step-size max-queue "
    names += "prompt-cache-size prompt-cache-bytes cache-dir cache-size "
    room = found.add_argument_group("memory and speed")
    add_flags(room, names + "draft-model num-draft-tokens")
    add_cache_flags(found)
    return found
