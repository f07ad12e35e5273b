"""The server's paths, as in OpenAI's API."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from anyio import CancelScope, CapacityLimiter, move_on_after, to_thread
from fastapi import FastAPI, HTTPException
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import create_model
from starlette.exceptions import HTTPException as AnyHTTPException

from .answers import ChatChoice, Choice, failure, head, usage
from .engine import Engine
from .grammar import matcher, vocabulary_of
from .guard import Guard
from .metrics import Metrics
from .request import BusyError, Event, Request
from .sampling import Sampling
from .schema import Body, ChatBody, CompletionBody, what_is_wrong

_LONG = 1 << 16  # a body of this many bytes must not hold up shorter ones
_UNREAD = 1 << 13  # pieces that wait for a slow client before its answer fails
_PATIENCE = 60  # seconds that pieces wait, and none is read, before it fails
_IN_JSON = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps would make one each time


@dataclass(frozen=True)
class ServerSettings:
    """The served model's name and defaults, who may ask, and how much."""

    name: str
    sampling: Sampling = field(default_factory=Sampling)  # unless a request says otherwise
    max_tokens: int = 512  # likewise
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template
    api_key: str | None = None
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    most_bytes: int = 1 << 26


def _wrong(status: int, said: str, **more: str | None) -> HTTPException:
    """An error response; with status 400, ``said`` must begin with the field at fault."""
    about = None if said.startswith("the body ") else said.partition(" ")[0].partition(".")[0]
    more = {"param": about} | more if status == 400 else more
    headers = {"Retry-After": "5"} if status == 503 else None  # seconds
    return HTTPException(status, failure(said, status, **more), headers)


def make_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """The application. Its caller must close the engine."""
    # No documentation pages: they would load scripts from another site.
    app = FastAPI(title="mlx_h2o server", responses=_RESPONSES, docs_url=None, redoc_url=None)
    allowed = settings.hosts, settings.origins, settings.api_key, settings.most_bytes
    app.add_middleware(Guard, *allowed)
    for kind in (AnyHTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _say)
    asking = _Asking(engine, settings, Metrics(engine))
    route = partial(app.add_api_route, response_model=None)
    streams: dict[int | str, Any] = {200: {"content": {"text/event-stream": {}}}}
    route("/v1/chat/completions", asking.chat, methods=["POST"], responses=streams)
    route("/v1/completions", asking.completion, methods=["POST"], responses=streams)
    route("/v1/models", asking.models, methods=["GET"])
    route("/v1/models/{name:path}", asking.model, methods=["GET"])
    route("/metrics", asking.tell_metrics, methods=["GET"], response_class=PlainTextResponse)
    route("/health", asking.health, methods=["GET"])
    return app


_DETAIL: Any = dict.fromkeys(("message", "type"), (str, ...))
_DETAIL |= dict.fromkeys(("param", "code"), (str | None, ...))
_ERROR = create_model("Error", error=(create_model("ErrorDetail", **_DETAIL), ...))
_RESPONSES: Any = {one: {"model": _ERROR} for one in (400, 401, 403, 404, 413, 500, 503)}


class _Asking:
    """The handlers of the paths."""

    def __init__(self, engine: Engine, settings: ServerSettings, metrics: Metrics) -> None:
        self.engine, self.settings, self.metrics = engine, settings, metrics
        # One thread each, so that short prompts do not wait for long ones, nor prompts for schemas.
        self._short, self._long, self._schemas = (CapacityLimiter(1) for _ in range(3))
        # Refusals are cached too. At shutdown, submitting nothing raises, which ends a trial.
        self._matcher = lru_cache(8)(partial(matcher, go_on=partial(engine.submit, ())))
        self._model = {"object": "model", "created": int(time.time()), "owned_by": "mlx_h2o"}

    async def health(self) -> Response:
        if fault := self.engine.fault:
            return JSONResponse({"status": "unavailable", "reason": fault}, 503)
        return JSONResponse({"status": "ok"})

    async def tell_metrics(self) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model(self.settings.name)]}

    async def model(self, name: str | None) -> dict[str, Any]:
        if name not in (None, self.settings.name, "default_model"):  # as mlx_lm's clients call it
            said = f"the model {name!r:.200} is not served, expected {self.settings.name!r}."
            raise _wrong(404, said, param="model", code="model_not_found")
        return {"id": self.settings.name} | self._model

    async def completion(self, body: CompletionBody, request: HttpRequest) -> Response:
        return await self._answer(body, Choice, request)

    async def chat(self, body: ChatBody, request: HttpRequest) -> Response:
        choice = partial(ChatChoice, tokenizer=self.engine.tokenizer, tools=body.tools_given)
        return await self._answer(body, choice, request)

    async def _made(
        self, body: Body, asked: HttpRequest, sink: Callable[[int, Event], None]
    ) -> list[Request]:
        """The requests of a body, one for each choice of its answer; ValueError if it is invalid,
        BusyError if the server ends meanwhile."""
        if "stream_options" in body.model_fields_set and not body.stream:
            raise ValueError("stream_options is given, expected stream to be true.")
        prompts = 1 if isinstance(body, ChatBody) else len(body.prompts)
        count, most = prompts * body.n, self.engine.memory.queue
        if count > most:
            said = f"n is {body.n} for {prompts:,} prompts, which makes {count:,} answers: "
            raise ValueError(f"{said}expected at most {most:,}, the server's --max-queue.")

        def made() -> list[Request]:
            encoded = body.encoded(self.engine.tokenizer, self.settings.template)
            return [
                self.engine.check(Request(
                    tokens, partial(sink, place * body.n + choice),
                    max_tokens=body.max_tokens or self.settings.max_tokens,
                    sampling=body.sampling(self.settings.sampling, choice),
                    stops=[body.stop] if isinstance(body.stop, str) else body.stop,
                    penalties=body.penalties(), state=state, top_logprobs=body.top_logprobs,
                    goes_on=isinstance(body, CompletionBody),
                ))
                for place, (tokens, state) in enumerate(encoded) for choice in range(body.n)
            ]  # fmt: skip

        is_long = int(asked.headers.get("content-length", _LONG)) >= _LONG
        requests = await to_thread.run_sync(made, limiter=self._long if is_long else self._short)
        if isinstance(body, ChatBody) and body.answer_schema is not None:
            if requests[0].state != "normal":
                raise ValueError("response_format is given, and the model thinks first.")
            aside = partial(to_thread.run_sync, limiter=self._schemas)
            known = await aside(vocabulary_of, self.engine.tokenizer, self.engine.vocabulary)
            grammar = await aside(self._matcher, known, body.answer_schema)
            if isinstance(grammar, str):
                raise ValueError(grammar)
            for one in requests:
                one.grammar = grammar
        return requests

    async def _answer(
        self, body: Body, choice: Callable[[int], Choice], asked: HttpRequest
    ) -> Response:
        came = time.monotonic()
        await self.model(body.model)
        told: asyncio.Queue[tuple[int, Event | None]] = asyncio.Queue()
        requests: list[Request] = []
        loop = asyncio.get_running_loop()
        waited, since = 1, came  # pieces after the last one came; when some were read last

        def tell(index: int, event: Event) -> None:
            nonlocal waited, since
            if (count := told.qsize()) < waited:
                since = time.monotonic()
            if count >= _UNREAD or time.monotonic() - since > _PATIENCE:
                event = Event(error=TimeoutError(f"{count:,} pieces of it were not read"))
                self.engine.leave(requests)
            told.put_nowait((index, event))
            waited = count + 1

        def sink(index: int, event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens
                loop.call_soon_threadsafe(tell, index, event)

        async def watch() -> None:
            """Let go of the requests when the client leaves, or at the end of the response."""
            while True:
                with move_on_after(10):  # for each piece, it would take longer than the piece
                    while (await asked.receive())["type"] != "http.disconnect":
                        continue
                    making.cancel()  # or others would wait for its prompt and its schema
                    self.engine.leave(requests)
                    tell(0, Event(error=ConnectionError("the client has left")))
                    return
                lost = BusyError("the server has ended before the answer did")  # in a long step
                told.put_nowait((0, Event(error=lost) if self.engine.gave_up else None))

        asked.state.watching = asyncio.ensure_future(watch())
        try:
            self.engine.expected += 1
            try:
                with CancelScope() as making:
                    requests += await self._made(body, asked, sink)
            finally:
                self.engine.expected -= 1  # first: to submit wakes the engine, which looks at it
            if making.cancel_called:
                return Response()  # which nobody reads
            self.engine.submit(requests)
        except BusyError as error:
            raise _wrong(503, f"{error}: try again later.") from error
        except ValueError as error:
            raise _wrong(400, str(error).removeprefix("[server] ")) from error
        choices = [*map(choice, range(len(requests)))]
        top = head(self.settings.name, isinstance(body, ChatBody), body.stream)
        pieces, took = self._pieces(choices, told, came), partial(usage, requests, body.n)
        if body.stream:
            wanted = body.stream_options.get("include_usage")
            events = _as_stream(top, pieces, took if wanted else None)
            return StreamingResponse(events, media_type="text/event-stream")
        try:
            async for _ in pieces:
                continue
        except Exception as error:
            raise _wrong(500, f"generation failed: {error}") from error
        return JSONResponse(top | {"choices": [one.whole for one in choices], "usage": took()})

    async def _pieces(
        self, choices: Sequence[Choice], told: asyncio.Queue[tuple[int, Event | None]], came: float
    ) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the choice of each chunk as it comes, and None now and then."""
        open_ones, first = len(choices), True
        while open_ones:
            index, event = await told.get()
            if event is None:
                yield None  # a stream then sends a keepalive
                continue
            if event.error is not None:
                raise event.error
            if first:
                self.metrics.first.observe(time.monotonic() - came)
                first = False
            open_ones -= event.finish is not None
            yield choices[index].take(event)
        self.metrics.whole.observe(time.monotonic() - came)


async def _as_stream(
    top: dict[str, Any], pieces: AsyncIterator[dict[str, Any] | None],
    took: Callable[[], dict[str, Any]] | None,
) -> AsyncIterator[str]:  # fmt: skip
    """Server-sent events, errors included. took: the usage to send at the end, if it is wanted."""

    def event(content: dict[str, Any]) -> str:
        return f"data: {_IN_JSON(content)}\n\n"

    if took is not None:
        top["usage"] = None
    try:
        async for choice in pieces:
            yield ": keepalive\n\n" if choice is None else event(top | {"choices": [choice]})
    except Exception as error:
        yield event(failure(f"generation failed: {error}", 500))
    else:
        if took is not None:
            yield event(top | {"choices": [], "usage": took()})
    yield "data: [DONE]\n\n"


async def _say(request: HttpRequest, error: Any) -> Response:
    """The response to any error, in OpenAI's format."""
    if isinstance(error, RequestValidationError):
        error = _wrong(400, what_is_wrong(error))
    elif not isinstance(error, AnyHTTPException):
        error = _wrong(500, f"the server failed: {error}")
    said, cause = error.detail, error.__cause__
    if not isinstance(said, dict):
        said = f"{said}: {request.method} {request.url.path}"
        if cause is not None:
            deep = "it is nested too deeply" if isinstance(cause, RecursionError) else cause
            said = f"the body cannot be read: {str(deep).partition(';')[0]}."
        said = failure(said)
    return JSONResponse(said, error.status_code, error.headers)
