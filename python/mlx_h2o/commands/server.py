"""`mlx_h2o server`: one model over HTTP."""

import argparse
import contextlib
import hashlib
import logging
import os
import signal
from functools import partial
from typing import Any

import mlx.core as mx
from jinja2 import TemplateSyntaxError

from ..lm.generate import load
from ..lm.models import facts_of
from ..lm.prompt_cache import budgets_of
from ..lm.ranks import Ranks
from ..lm.routing import evicting_caches
from ..lm.saving import FORMAT
from .flags import cache_parser
from .options import CacheSettings, loaded
from .parsing import number, told

_LOG = logging.getLogger("mlx_h2o")


def run(args: argparse.Namespace, settings: CacheSettings, ranks: Ranks) -> None:
    """Serve until a signal ends it."""
    if args.draft_model and "budgets" in settings.given:
        raise ValueError("--budgets with --draft-model: its layers are not those of the file")
    if "" in (args.host, args.api_key):
        raise ValueError("--host or --api-key is empty, expected a text")
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(message)s")
    try:
        from ..serving import disk, http, memory, request, sampling, schema, snapshots
        from ..serving.engine import Engine
        from ..serving.listening import listen, serve
    except ImportError as why:
        raise ValueError(f"{why.name} is missing, expected pip install 'mlx-h2o[server]'") from why

    with contextlib.ExitStack() as stack:
        # Fail on a port that is taken before the model is loaded.
        listener = None if ranks.rank else stack.enter_context(listen(args.host, args.port))
        template = {"chat_template": args.chat_template} if args.chat_template else {}
        model, tokenizer = loaded(args, ranks, **template)
        models = [model] if args.draft_model is None else [model, load(args.draft_model)[0]]
        mx.eval([one.parameters() for one in models])
        make = partial((settings := settings.fitted(*models)).caches, *models)
        room = memory.Memory(
            models, make, args.memory or memory.usual_bytes(), decode=args.decode_concurrency,
            prompts=args.prompt_concurrency, queue=args.max_queue, step=args.prefill_step_size,
            drafts=args.num_draft_tokens,
        )  # fmt: skip
        if room.lowered:
            said = "memory of %s bytes: %d prompts are read, and %d answers generated, at a time"
            _LOG.warning(said, f"{room.limit:,}", room.prompts, room.decode)
        most = room.free // 4 if args.prompt_cache_bytes is None else args.prompt_cache_bytes
        store: disk.PromptStore | None = None
        if args.cache_dir is not None:
            store = disk.PromptStore(args.cache_dir, args.cache_size, _name(models, make))
            stack.enter_context(contextlib.closing(store))
        kept = snapshots.Snapshots(most, args.prompt_cache_size, ranks)
        engine = Engine(tokenizer, room, kept, store)
        stack.callback(engine.close, 1)
        room.apply()
        defaults = sampling.Sampling(args.temp, args.top_p, args.top_k, args.min_p)
        # Refuse settings that cannot answer any request now, not at the first one.
        hello = schema.ChatBody.model_validate({"messages": [{"role": "user", "content": "hello"}]})
        try:
            engine.check(request.Request([0], print, args.max_tokens, defaults))
            hello.encoded(tokenizer, args.chat_template_args)
        except ValueError as error:
            cause = error.__cause__  # if the chat template refused: other chats may suit it
            if cause is None or isinstance(cause, TemplateSyntaxError):
                field, _, said = told(error).replace("_kwargs ", "_args ", 1).partition(" ")
                flag = f"--{field.replace('_', '-')}" if field in vars(args) else field
                raise ValueError(f"{flag} {said}") from error
            _LOG.warning("the chat template refuses a single message: %s", cause)
        asked = http.ServerSettings(
            args.model, defaults, args.max_tokens, args.chat_template_args, args.api_key,
            args.allowed_hosts, args.allowed_origins, args.max_body,
        )  # fmt: skip
        if not tokenizer.has_chat_template:
            _LOG.warning("%s has no chat template: chats become lines like user: hello", args.model)
        if listener is None:  # the first rank handles signals
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.signal(one, signal.SIG_IGN)
            engine.ended.wait()
        else:
            host, port = listener.getsockname()[:2]
            where = args.model, f"[{host}]" if ":" in host else host, port, settings
            said = "%s on http://%s:%d, %s; %s bytes beside the weights%s"
            _LOG.info(said, *where, f"{room.free:,}", ranks)
            serve(http.make_app(engine, asked), engine, listener, args.grace)
        if engine.error is not None:
            raise ValueError(f"the engine has ended: {engine.error}")
    if not engine.ended.is_set():
        os._exit(0)  # a long step still runs: a normal exit would tear down MLX under it


def _name(models: list[Any], make: Any) -> str:
    """A name that is equal for equal models, cache settings and formats of files."""
    caches = make()
    settings = [one.config for one in evicting_caches(caches)], budgets_of(caches)
    return hashlib.sha256(repr((FORMAT, *settings, *map(facts_of, models))).encode()).hexdigest()


def parser() -> argparse.ArgumentParser:
    groups = {
        "": "model adapter-path trust-remote-code pipeline host port api-key allowed-hosts "
        "allowed-origins max-body grace log-level use-default-chat-template",
        "request defaults": "max-tokens temp top-p top-k min-p chat-template chat-template-args",
        "memory and speed": "memory decode-concurrency prompt-concurrency prefill-step-size "
        "max-queue prompt-cache-size prompt-cache-bytes cache-dir cache-size draft-model "
        "num-draft-tokens",
    }
    return cache_parser(
        "Serve one model over HTTP, with OpenAI's API.",
        "model port memory max-kv-bytes max-kv-size", groups, model="demo",
        top_p=(number(1e-9, 1, float), 1.0, "P", "sample from the likeliest of this total"),
        max_tokens=(number(1), 512, "N", "maximum tokens of an answer"),
    )  # fmt: skip
