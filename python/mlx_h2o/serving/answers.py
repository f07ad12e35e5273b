"""Turn the engine's events into answers in OpenAI's format, whole or streamed in chunks."""

import json
import logging
import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from .request import Event, Request
from .schema import FunctionCall
from .text import TokenLogprob

_LOG = logging.getLogger("mlx_h2o")


def failure(message: str, status: int = 400, **more: str | None) -> dict[str, Any]:
    """The body of an error with this HTTP status. more: param, code."""
    kinds = {401: "authentication_error", 500: "api_error", 503: "overloaded_error"}
    kind = kinds.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None} | more}


class Choice:
    """One choice of a completion, and its text so far."""

    def __init__(self, index: int) -> None:
        self.index, self._decoder = index, getincrementaldecoder("utf-8")("replace")
        self._said: dict[str, str] = {"content": ""}
        self._finish: str | None = None
        self._logprobs: list[TokenLogprob] = []
        self._offsets = [0]

    def take(self, event: Event) -> dict[str, Any]:
        """Take an event, and return what it adds as the choice of a chunk."""
        self._finish = event.finish
        for one in event.logprobs:
            self._offsets.append(self._offsets[-1] + len(self._decoder.decode(one.data)))
        self._logprobs += event.logprobs
        return self._as_choice(self._added(event), event.logprobs)

    @property
    def whole(self) -> dict[str, Any]:
        """The choice as a complete answer has it."""
        return self._as_choice({"text": self._said["content"]}, self._logprobs)

    def _added(self, event: Event) -> dict[str, Any]:
        self._said["content"] += (text := "".join(text for _, text in event.segments))
        return {"text": text}

    def _as_choice(self, said: dict[str, Any], told: Sequence[TokenLogprob]) -> dict[str, Any]:
        logprobs = self._logprobs_of(told) if told else None
        return {"index": self.index, **said, "finish_reason": self._finish, "logprobs": logprobs}

    def _logprobs_of(self, told: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [one.name for one in told],
            "token_logprobs": [one.logprob for one in told],
            "top_logprobs": [_by_name(one.top) for one in told],
            "text_offset": self._offsets[-1 - len(told) : -1],
        }


class ChatChoice(Choice):
    """One choice of a chat: content, reasoning and tool calls."""

    def __init__(self, index: int, tokenizer: Any, tools: list[dict[str, Any]]) -> None:
        super().__init__(index)
        self._tokenizer, self._tools = tokenizer, tools
        self._calls: list[dict[str, Any]] = []
        self._call: str | None = None
        self._begun: dict[str, Any] = {"role": "assistant"}

    @property
    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"} | self._said
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = self._calls
        return self._as_choice({"message": message}, self._logprobs)

    def _added(self, event: Event) -> dict[str, Any]:
        delta, self._begun = self._begun, {}
        for kind, text in event.segments:
            if kind == "tool":
                self._call = (self._call or "") + text
                continue
            self._end_call(delta, self._tokenizer.tool_call_end or "")
            if text:
                self._add(delta, "reasoning" if kind == "reasoning" else "content", text)
        if event.finish is not None:
            self._end_call(delta, "", whole=not (event.cut or self._tokenizer.tool_call_end))
            if event.finish == "stop" and self._calls:
                self._finish = "tool_calls"
        return {"delta": delta}

    def _add(self, delta: dict[str, Any], name: str, text: str) -> None:
        for said in (delta, self._said):
            said[name] = said.get(name, "") + text

    def _end_call(self, delta: dict[str, Any], end: str, whole: bool = True) -> None:
        """Report the tool call that has been collected. If it is cut off, was not asked for or
        cannot be parsed, it becomes content, with its ``end`` mark."""
        if self._call is None:
            return
        text, self._call = self._call, None
        try:
            if not (whole and self._tools):
                raise ValueError("it is cut" if self._tools else "no tools were given")
            parsed = self._tokenizer.tool_parser(text, self._tools)
            calls = [*map(_as_call, parsed if parsed and isinstance(parsed, list) else [parsed])]
        except Exception as error:  # there are many parsers, and models write anything
            _LOG.warning("a tool call of the model cannot be read: %s", error)
            self._add(delta, "content", f"{self._tokenizer.tool_call_start}{text}{end}")
            return
        for call in calls:
            told = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": call}
            delta.setdefault("tool_calls", []).append({"index": len(self._calls)} | told)
            self._calls.append(told)

    def _logprobs_of(self, told: Sequence[TokenLogprob]) -> dict[str, Any]:
        def known(one: TokenLogprob) -> dict[str, Any]:
            return {"token": one.text, "logprob": one.logprob, "bytes": list(one.data)}

        return {"content": [known(one) | {"top_logprobs": [*map(known, one.top)]} for one in told]}


def _by_name(likely: Sequence[TokenLogprob]) -> dict[str, float]:
    """Log probabilities by name; a second token of the same name goes by its id."""
    found: dict[str, float] = {}
    for one in likely:
        found[f"token_id:{one.token}" if one.name in found else one.name] = one.logprob
    return found


def _as_call(parsed: Any) -> dict[str, str]:
    """Raises an error if a client could not read the call, or send it back."""
    call = FunctionCall(name=parsed["name"], arguments=parsed.get("arguments"))
    text = json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
    f"{call.name}{text}".encode()  # fails on half of a surrogate pair
    return {"name": call.name, "arguments": text}


def head(model: str, chat: bool, stream: bool) -> dict[str, Any]:
    """The fields that head a complete answer, or each chunk of a stream."""
    name, kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
    kind += ".chunk" if chat and stream else ""
    name += f"-{uuid.uuid4().hex}"
    return {"object": kind, "id": name, "created": int(time.time()), "model": model}


def usage(requests: Sequence[Request], each: int) -> dict[str, Any]:
    """The token counts of an answer with ``each`` requests per prompt."""
    prompts = requests[::each]
    read = sum(len(one.tokens) for one in prompts)
    made = sum(len(one.answer) for one in requests)
    return {
        "prompt_tokens": read,
        "completion_tokens": made,
        "total_tokens": read + made,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached or 0 for one in prompts)},
    }
