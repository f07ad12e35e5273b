"""mlx_lm's server: a request is checked before generation sees it, and one that fails there ends
alone."""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from queue import Queue
from typing import Any

from ..config import H2OConfig
from . import upstream
from .prompt_cache import beyond_context, context_length, evicting_caches, tokens_seen
from .prompt_store import PromptStore
from .replacements import Target
from .sharing import LEAST_SHARED, read_once, unshared_because

__all__ = ["SEEDS", "check_request", "server_targets"]

SEEDS = 2**64
"""How many there are, from 0 on."""

_Read = Callable[[list[Any] | None, list[int]], list[Any]]
"""Reads further tokens into caches, None: new ones, and has copies of them share their rows."""

_LONGEST = 1 << 26
"""Bytes of a request."""


def server_targets(
    config: H2OConfig,
    store: PromptStore | None,
    identify: Callable[[Any], str],
    fit: Callable[[Any, Any], None],
    make: Callable[[Any], list[Any]],
) -> list[Target]:
    """What is replaced in mlx_lm's server.

    Args:
        config: the settings of caches: how many draft tokens they take back at most, and how many
            first tokens they never evict, whose rows prompts then share.
        store: where prompt caches outlive the server, or None.
        identify: a text that is the same for the same model and settings of its caches.
        fit: is told of a model and its draft model before caches are made for them.
        make: caches of a model.
    """
    speculative, size = config.speculative, config.prefix_size
    known: dict[Any, str] = {}
    made_for: dict[Any, int | None] = {}
    readers: dict[Any, _Read] = {}

    def loaded(provider: Any) -> None:
        models = provider.model, provider.draft_model
        fit(*models)
        made_for[provider.model_key] = context_length(provider.model)
        if store is not None:
            texts = [identify(model) for model in models if model is not None]
            known[provider.model_key] = " ".join(texts)
        if size >= LEAST_SHARED:
            readers.clear()  # of the model before
            if reason := unshared_because(provider.model, make(provider.model)):
                logging.warning("mlx_h2o server: prompts share no rows: %s", reason)
            else:
                step = provider.cli_args.prefill_step_size
                readers[provider.model_key] = _reading(weakref.ref(provider.model), make, step)

    handler = _handler(upstream.original("server", "APIHandler"))
    wraps: dict[str, Callable[[Any], Any]] = {
        "stream_generate": lambda original: _drafting(original, speculative),
        "ModelProvider": lambda original: _providing(original, speculative, loaded),
        "ResponseGenerator": _surviving,
        "_run_http_server": lambda run: _running(run, handler),
    }

    def prompts(original: type[Any]) -> type[Any]:
        kept = _telling(original, made_for)
        kept = kept if store is None else _stored(kept, store, known)
        return kept if size < LEAST_SHARED else _sharing(kept, size, readers)

    wraps["LRUPromptCache"] = prompts
    return [upstream.target("server", name, wrap) for name, wrap in wraps.items()]


def _running(run: Callable[..., Any], handler: type[Any]) -> Callable[..., Any]:
    """Without an end of the generation's thread the process would not end either."""

    def run_http_server(host: str, port: int, response_generator: Any, **given: Any) -> None:
        try:
            run(host, port, response_generator, handler_class=handler, **given)
        except BaseException:  # such as a port that is taken
            response_generator.stop_and_join()
            raise

    return run_http_server


def check_request(body: Mapping[str, Any], *, chat: bool) -> None:
    """Raises ValueError, in a sentence for the client, for a body that generation cannot take.

    Args:
        body: of a request for completions, parsed.
        chat: whether it asks for those of a chat.
    """
    if chat:
        _check_messages(body)
    elif not isinstance(body.get("prompt"), str) or not body["prompt"]:
        raise _wrong(body, "prompt", "a text that is not empty")
    stop = body.get("stop") or []
    words = [stop] if isinstance(stop, str) else stop
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise _wrong(body, "stop", "a text or a list of texts, none of them empty")
    seed = body.get("seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < SEEDS):
        raise _wrong(body, "seed", "a whole number from 0 to 2^64 - 1")
    for name, kind, expected in (
        ("stream_options", dict, "an object"),
        ("chat_template_kwargs", dict, "an object"),
        ("role_mapping", dict, "an object"),
        ("tools", list, "a list"),
        ("draft_model", str, "a text"),
    ):
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise _wrong(body, name, expected)
    for name, value in body.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise _wrong(body, name, "a finite number")


def _check_messages(body: Mapping[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong(body, "messages", "a list that is not empty")
    for index, message in enumerate(messages):
        fits = isinstance(message, dict) and isinstance(message.get("role"), str)
        content = message.get("content") if fits else None
        parts = content if isinstance(content, list) else []
        fits = fits and isinstance(content, str | list | None)
        if not fits or not all(isinstance(part, dict) for part in parts):
            raise ValueError(
                f"messages[{index}] is {_said(message)}, expected an object with a role and a "
                "content, each a text."
            )


def _wrong(body: Mapping[str, Any], name: str, expected: str) -> ValueError:
    return ValueError(f"{name} is {_said(body.get(name))}, expected {expected}.")


def _said(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class _WrongError(ValueError):
    """Of a request that has not been answered yet."""


def _handler(original: type[Any]) -> type[Any]:
    class APIHandler(original):  # type: ignore[misc]
        generating = False

        def parse_request(self) -> bool:
            fits = bool(super().parse_request())
            length = self.headers.get("Content-Length", "") if fits else ""
            if length.startswith("-"):
                self.refuse(f"Content-Length is {length}, expected 0 or more.")
            elif length.isdecimal() and int(length) > _LONGEST:
                message = f"the body has {int(length):,} bytes, expected at most {_LONGEST:,}."
                self.refuse(message, status=413)
            else:
                return fits
            return False

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except UnicodeDecodeError:
                self.refuse("the body is not UTF-8, expected JSON.")
            except RecursionError:
                self.refuse("the body is nested too deeply.")
            except _WrongError as error:  # mlx_lm 0.32.0; later ones answer themselves
                self.refuse(str(error))
            except ConnectionError:
                self.close_connection = True
                logging.info("mlx_h2o server: a client went away before its answer was complete")

        def refuse(self, message: str, status: int = 400) -> None:
            self._set_completion_headers(status)
            self.end_headers()
            self.wfile.write(json.dumps({"error": message}).encode())
            self.close_connection = True

        def validate_model_parameters(self) -> None:
            try:
                super().validate_model_parameters()
                check_request(self.body, chat=self.path.endswith("/chat/completions"))
            except ValueError as error:
                raise _WrongError(str(error)) from error

        def handle_completion(self, *args: Any) -> None:
            self.generating = True
            try:
                super().handle_completion(*args)
            finally:
                self.generating = False

        def _set_completion_headers(self, status_code: int = 200) -> None:
            error = sys.exc_info()[1]
            if self.generating and status_code == 404 and not isinstance(error, OSError):
                # Found it is: what it asks for is wrong, or we are.
                status_code = 400 if isinstance(error, ValueError) else 500
            super()._set_completion_headers(status_code)

    return APIHandler


def _surviving(original: type[Any]) -> type[Any]:
    """Its thread goes on behind an error; the requests that it had taken fail."""

    class ResponseGenerator(original):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._taken: weakref.WeakSet[Queue[Any]] = weakref.WeakSet()
            super().__init__(*args, **kwargs)  # which starts the thread

        def _next_request(self, timeout: float | None = None) -> Any:
            request = super()._next_request(timeout)
            if request is not None:
                self._taken.add(request[0])
            return request

        def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
            found = super()._tokenize(tokenizer, request, args)
            if not found[0]:
                raise ValueError("the prompt has no tokens, expected at least one.")
            if biased := args.logits.logit_bias:
                size = max(tokenizer.vocab_size, len(tokenizer.get_vocab()))
                if wrong := [token for token in biased if not 0 <= token < size]:
                    raise ValueError(
                        f"logit_bias names the token {wrong[0]}, expected one from 0 to {size - 1}."
                    )
            return found

        def _run_generate(self) -> None:
            """In a thread that stays: at the end of one MLX 0.32 asks for Python's lock, and the
            process is aborted when Python itself is about to end."""
            done = threading.Event()

            def generate() -> None:
                try:
                    self._generate_on()
                finally:
                    done.set()
                threading.Event().wait()

            threading.Thread(target=generate, daemon=True).start()
            done.wait()

        def _generate_on(self) -> None:
            while True:
                self._taken.clear()
                try:
                    self._generate()
                    return
                except Exception as error:
                    logging.exception("mlx_h2o server: generation failed")
                    if not self._taken:  # it cannot even begin
                        self._generation_failed = True
                        return
                    for waiting in list(self._taken):
                        waiting.put(RuntimeError(f"generation failed: {error}"))

    return ResponseGenerator


def _drafting(original: Callable[..., Any], speculative: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def stream_generate(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("draft_model") is not None:
            kwargs["num_draft_tokens"] = min(kwargs["num_draft_tokens"], speculative)
        return original(*args, **kwargs)

    return stream_generate


def _providing(original: type[Any], speculative: int, loaded: Callable[[Any], None]) -> type[Any]:
    class ModelProvider(original):  # type: ignore[misc]
        def load(self, *args: Any, **kwargs: Any) -> Any:
            found = super().load(*args, **kwargs)
            if self.draft_model is not None and speculative == 0:
                self.reset()
                raise ValueError(
                    "[server] the request names a draft model, whose rejected tokens the caches "
                    "of this server cannot take back: expected --draft-model when it was started."
                )
            loaded(self)
            return found

    return ModelProvider


def _telling(original: type[Any], made_for: Mapping[Any, int | None]) -> type[Any]:
    """Says once of each model that a text is longer than it is made for."""
    told: set[Any] = set()

    class LRUPromptCache(original):  # type: ignore[misc]
        def insert_cache(
            self, model: Any, tokens: list[Any], prompt_cache: list[Any], **given: Any
        ) -> None:
            said = beyond_context(made_for.get(model), tokens_seen(prompt_cache))
            if said and model not in told:
                told.add(model)
                logging.warning("mlx_h2o server: %s", said)
            super().insert_cache(model, tokens, prompt_cache, **given)

    return LRUPromptCache


def _stored(original: type[Any], store: PromptStore, known: Mapping[Any, str]) -> type[Any]:
    """mlx_lm's prompt caches in memory, and behind them those on disk."""

    class LRUPromptCache(original):  # type: ignore[misc]
        def fetch_nearest_cache(self, model: Any, tokens: list[Any]) -> Any:
            cache, rest = super().fetch_nearest_cache(model, tokens)
            found, length = store.find(known[model], tokens, len(tokens) - len(rest))
            return (found, tokens[length:]) if found else (cache, rest)

        def insert_cache(
            self, model: Any, tokens: list[Any], prompt_cache: list[Any], **given: Any
        ) -> None:
            super().insert_cache(model, tokens, prompt_cache, **given)
            store.keep(known[model], tokens, prompt_cache)

    return LRUPromptCache


def _reading(known: Callable[[], Any], make: Callable[[Any], list[Any]], step: int) -> _Read:
    def read(caches: list[Any] | None, tokens: list[int]) -> list[Any]:
        model = known()
        caches = caches or make(model)
        read_once(model, caches, tokens, step)
        return caches

    return read


def _sharing(original: type[Any], size: int, readers: Mapping[Any, _Read]) -> type[Any]:
    """Prompts whose first ``size`` tokens are the same, which are read once, share their rows."""

    class LRUPromptCache(original):  # type: ignore[misc]
        def fetch_nearest_cache(self, model: Any, tokens: list[Any]) -> Any:
            cache, rest = super().fetch_nearest_cache(model, tokens)
            found, read = len(tokens) - len(rest), readers.get(model)
            stands = any(one.prefix_rows for one in evicting_caches(cache or []))
            whole = all(isinstance(token, int) for token in tokens[:size])  # no parts of images
            if read is None or stands or not whole or not found <= size < len(tokens):
                return cache, rest
            shared = read(cache, tokens[found:size])
            self.insert_cache(model, tokens[:size], shared, cache_type="system")
            return copy.deepcopy(shared), tokens[size:]

    return LRUPromptCache
