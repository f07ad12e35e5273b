"""From what the engine tells to answers in the form of OpenAI's API, whole and in pieces."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from .request import Event, Request
from .text import TokenLogprob

__all__ = ["Answer", "ChatChoice", "Choice", "failure"]

_LOG = logging.getLogger("mlx_h2o")


def failure(
    message: str, kind: str = "invalid_request_error", param: str | None = None,
    code: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """An error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Choice:
    """Of a completion: its text so far."""

    def __init__(self, index: int) -> None:
        self.index, self.finish = index, None
        self.text, self._at = "", 0
        self._logprobs: list[TokenLogprob] = []

    def take(self, event: Event) -> dict[str, Any]:
        """What an event adds, as a choice of a piece."""
        text = "".join(text for _, text in event.segments)
        logprobs = self._logprobs_of(event.logprobs)
        self.text += text
        self._logprobs += event.logprobs
        self.finish = event.finish  # type: ignore[assignment]
        return self._as_choice(text, logprobs)

    @property
    def whole(self) -> dict[str, Any]:
        """The choice of a whole answer."""
        self._at = 0
        return self._as_choice(self.text, self._logprobs_of(self._logprobs))

    def _as_choice(self, text: str, logprobs: Any) -> dict[str, Any]:
        found = {"index": self.index, "text": text, "finish_reason": self.finish}
        return found | {"logprobs": logprobs}

    def _logprobs_of(self, told: Sequence[TokenLogprob]) -> Any:
        if not told:
            return None
        offsets = []
        for one in told:
            offsets.append(self._at)
            self._at += len(one.text)
        return {
            "tokens": [one.text for one in told],
            "token_logprobs": [one.logprob for one in told],
            "top_logprobs": [{each.text: each.logprob for each in one.top} for one in told],
            "text_offset": offsets,
        }


class ChatChoice(Choice):
    """Of a chat: content, reasoning, and calls of tools."""

    def __init__(self, index: int, tokenizer: Any, tools: list[dict[str, Any]]) -> None:
        super().__init__(index)
        self._tokenizer, self._tools = tokenizer, tools
        self._message: dict[str, Any] = {"content": "", "reasoning": ""}
        self._calls: list[dict[str, Any]] = []
        self._call: str | None = None
        self._begun = False

    def take(self, event: Event) -> dict[str, Any]:
        delta: dict[str, Any] = {} if self._begun else {"role": "assistant"}
        self._begun = True
        for kind, text in event.segments:
            if kind == "tool":
                self._call = (self._call or "") + text
                continue
            self._end_call(delta)
            if text:
                name = "reasoning" if kind == "reasoning" else "content"
                self._add(delta, name, text)
        if event.finish is not None:
            self._end_call(delta)
            self.finish = event.finish  # type: ignore[assignment]
            if event.finish == "stop" and self._calls:
                self.finish = "tool_calls"  # type: ignore[assignment]
        self._logprobs += event.logprobs
        found = {"index": self.index, "delta": delta, "finish_reason": self.finish}
        return found | {"logprobs": self._logprobs_of(event.logprobs)}

    @property
    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._message["content"]}
        if self._message["reasoning"]:
            message["reasoning"] = self._message["reasoning"]
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"}
                for call in self._calls
            ]
        found = {"index": self.index, "message": message, "finish_reason": self.finish}
        return found | {"logprobs": self._logprobs_of(self._logprobs)}

    def _add(self, delta: dict[str, Any], name: str, text: str) -> None:
        delta[name] = delta.get(name, "") + text
        self._message[name] += text

    def _end_call(self, delta: dict[str, Any]) -> None:
        """A call is whole: told as such, or as text where the model wrote none that can be read."""
        if self._call is None:
            return
        text, self._call = self._call, None
        try:
            parsed = self._tokenizer.tool_parser(text, self._tools)
            calls = [
                {"name": str(one["name"]), "arguments": _as_text(one.get("arguments", {}))}
                for one in (parsed if isinstance(parsed, list) else [parsed])
            ]
        except Exception as error:  # parsers are many, and models write anything
            _LOG.warning("a tool call of the model cannot be read: %s", error)
            start, end = self._tokenizer.tool_call_start, self._tokenizer.tool_call_end
            self._add(delta, "content", f"{start}{text}{end or ''}")
            return
        for call in calls:
            told = {"index": len(self._calls), "id": f"call_{uuid.uuid4().hex[:24]}"}
            told |= {"type": "function", "function": call}
            self._calls.append(told)
            delta.setdefault("tool_calls", []).append(told)

    def _logprobs_of(self, told: Sequence[TokenLogprob]) -> Any:
        return {"content": [_chat_logprob(one) for one in told]} if told else None


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _chat_logprob(one: TokenLogprob, inner: bool = False) -> dict[str, Any]:
    found = {"token": one.text, "logprob": one.logprob, "bytes": list(one.data)}
    return found if inner else found | {"top_logprobs": [_chat_logprob(t, True) for t in one.top]}


class Answer:
    """The frame of an answer: who gave it when, and what it took.

    Args:
        model: its name.
        chat: whether it is to a chat.
        requests: one for each choice.
        prompts: how many prompts they are of, each with as many choices.
    """

    def __init__(self, model: str, chat: bool, requests: Sequence[Request], prompts: int) -> None:
        self._requests, self._prompts = requests, prompts
        self._kind = "chat.completion" if chat else "text_completion"
        self._chat = chat
        prefix = "chatcmpl" if chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._head |= {"model": model}

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        found: dict[str, Any] = {"object": self._kind, **self._head}
        return found | {"choices": [choice.whole for choice in choices], "usage": self.usage()}

    def piece(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = f"{self._kind}.chunk" if self._chat else self._kind
        return {"object": kind, **self._head, "choices": choices, **more}

    def usage(self) -> dict[str, Any]:
        each = len(self._requests) // self._prompts
        prompts = self._requests[::each]
        read = sum(len(one.tokens) for one in prompts)
        made = sum(len(one.answer) for one in self._requests)
        return {
            "prompt_tokens": read,
            "completion_tokens": made,
            "total_tokens": read + made,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached or 0 for one in prompts)},
        }
