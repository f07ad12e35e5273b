"""Request bodies: their fields, ranges and conversions. Anything else is refused."""

from __future__ import annotations

import inspect
import json
import re
import secrets
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, model_validator
from transformers import PreTrainedTokenizerBase

from .sampling import Sampling

_WHOLE = 1 << 30  # context of penalties that look at all tokens
PLAIN = (
    "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The chat template for models that have none."""
_NAMES = re.compile(r"(?!(str|int|constrained-str)$)[\w.-]+")  # pydantic's paths name types too
_EXPECTED = re.compile(r"\w+ should (?:be|have) ")
_OURS = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
"""Arguments of chat templates that the server sets; only ``documents`` is left to clients."""
_One = TypeVar("_One")
_List = Annotated[list[_One], Field(fail_fast=True)]  # or a long list makes a long error
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_ID = re.compile("0|-?[1-9][0-9]{0,18}")  # of a token, which 05 would name twice
_Token = Annotated[int, BeforeValidator(lambda key: int(key) if _ID.fullmatch(key) else key)]
_Biases = dict[_Token, Annotated[float, Field(ge=-100, le=100)]]
_Arguments = Annotated[
    Json[dict[str, Any]] | dict[str, Any], BeforeValidator(lambda one: {} if one == "" else one)
]
"""An object, or the JSON of one; an empty text stands for no arguments."""


class _Part(BaseModel):
    """A part of a request. A null field counts as absent; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, given: Any) -> Any:
        """Drop nulls, and unknown fields but the first: pydantic would report each at length."""
        if not isinstance(given, dict):
            return given
        found = {name: value for name, value in given.items() if value is not None}
        if cls.model_config["extra"] == "forbid":
            known = cls.__signature__.parameters  # computed once, with aliases
            for name in [name for name in found if name not in known][1:]:
                del found[name]
        return found


class JsonSchema(_Part):
    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(None, description="every schema is kept to")
    of: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError(f"type is {self.type}, expected json_schema with json_schema alone")
        return self


class TextPart(_Part):
    type: Literal["text"]
    text: str


class FunctionCall(_Part):
    name: str
    arguments: _Arguments = Field(default_factory=dict)


class ToolCall(_Part):
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class Message(_Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _List[TextPart] = ""
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # what some servers call it
    tool_calls: _List[ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: text, and arguments that are objects."""
        found = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            found["content"] = "".join(part.text for part in self.content)
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        return found | {"role": "system" if self.role == "developer" else self.role}


class Function(_Part):
    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Part):
    type: Literal["function"]
    function: Function


class _Body(_Part):
    """Fields that completions and chats share. Where the default is None, the server's holds."""

    model: str | None = Field(None, description="the served model, or default_model")
    max_tokens: int | None = Field(None, ge=1, le=1 << 24)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    xtc_probability: float = Field(0.0, ge=0, le=1)
    xtc_threshold: float = Field(0.1, ge=0, le=0.5)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    n: int = Field(1, ge=1, le=128)
    stop: _Stop | Annotated[_List[_Stop], Field(max_length=64)] = Field(default_factory=list)
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool | None] = Field(default_factory=dict)
    logit_bias: _Biases = Field(default_factory=dict, fail_fast=True)  # keys of JSON are strings
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-100, le=100)
    frequency_penalty: float = Field(0.0, ge=-100, le=100)
    repetition_context_size: int = Field(_WHOLE, ge=1, le=_WHOLE)
    presence_context_size: int = Field(_WHOLE, ge=1, le=_WHOLE)
    frequency_context_size: int = Field(_WHOLE, ge=1, le=_WHOLE)
    user: str | None = Field(None, description="changes nothing, as in OpenAI's API")

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        found: Any = cls._plain(given)  # type: ignore[operator]
        for name, value in found.items() if isinstance(found, dict) else ():
            try:
                json.dumps([name, value], ensure_ascii=False).encode()
            except (UnicodeEncodeError, RecursionError) as error:
                deep = isinstance(error, RecursionError)
                said = "is nested too deeply" if deep else "has half of a surrogate pair"
                raise ValueError(f"{ascii(name)[1:-1]:.80} {said}") from error
        return found

    def sampling(self, defaults: Sampling, choice: int) -> Sampling:
        """How to sample a choice; each choice has its own seed."""
        given = self.model_dump(include={one.name for one in fields(Sampling)}, exclude_none=True)
        own = secrets.randbits(64) if self.seed is None else self.seed + choice
        return replace(defaults, **given | {"seed": own % (1 << 64)})

    def penalties(self) -> dict[str, Any]:
        """Arguments of mlx_lm's ``make_logits_processors``; empty if none are asked for."""
        found: dict[str, Any] = {"logit_bias": self.logit_bias} if self.logit_bias else {}
        for name, none in (("repetition", 1), ("presence", 0), ("frequency", 0)):
            if (penalty := getattr(self, f"{name}_penalty")) != none:
                found[f"{name}_penalty"] = penalty
                found[f"{name}_context_size"] = getattr(self, f"{name}_context_size")
        return found


class CompletionBody(_Body):
    prompt: str | _List[int] | _List[str] | _List[_List[int]]
    top_logprobs: int | None = Field(None, ge=0, le=20, alias="logprobs")  # as chats call it

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts; each is a text, or tokens."""
        if not self.prompt or isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)

    def encoded(self, tokenizer: Any, settings: dict[str, Any]) -> list[tuple[list[int], str]]:
        """The tokens of each prompt, and the kind of text with which its answer begins."""
        encode = tokenizer.encode
        return [(encode(one) if isinstance(one, str) else one, "normal") for one in self.prompts]


class ChatBody(_Body):
    messages: _List[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 24)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: _List[Tool] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _goes_together(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given, expected logprobs to be true")
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        self.top_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self

    @property
    def tools_given(self) -> list[dict[str, Any]]:
        """The tools as chat templates and parsers expect them; empty if none may be called."""
        given = self.tools if self.tool_choice == "auto" else []
        return [tool.model_dump(exclude_none=True) for tool in given]

    def encoded(self, tokenizer: Any, settings: dict[str, Any]) -> list[tuple[list[int], str]]:
        """The tokens of the chat, and the kind of text with which its answer begins.

        Args:
            settings: arguments of the chat template; those of the request override them.

        Raises:
            ValueError: the chat template knows no tools, or refuses the messages or arguments.
        """
        if self.tools and not tokenizer.has_tool_calling:
            raise ValueError("tools is given, and the chat template of this model knows no tools.")
        given = settings | self.chat_template_kwargs
        if taken := sorted(_OURS & given.keys() - {"documents"}):
            raise ValueError(f"chat_template_kwargs has {taken[0]}, which is the server's.")
        if not tokenizer.has_chat_template:
            given["chat_template"] = PLAIN
        if tools := self.tools_given:
            given["tools"] = tools
        messages = [message.for_template() for message in self.messages]
        try:
            made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **given)
        except Exception as error:  # templates are programs that can raise anything
            raise ValueError(f"messages do not suit the model's chat template: {error}.") from error
        tokens, state = list(made), "normal"
        if tokenizer.has_thinking and (at := tokenizer.rfind_think_start(tokens)) >= 0:
            # Only if the template began to think, not if a message quotes the mark.
            behind = tokenizer.decode(tokens[at + len(tokenizer.think_start_tokens) :])
            state = "normal" if behind.strip() else "reasoning"
        return [(tokens, tokenizer.response_initial_state or state)]

    @property
    def answer_schema(self) -> str | None:
        """The JSON schema of the answer, as text; None: any text will do."""
        asked = self.response_format
        if asked is None or asked.type == "text":
            return None
        return json.dumps(asked.json_schema.of if asked.json_schema else {"type": "object"})


Body = CompletionBody | ChatBody


def what_is_wrong(error: Any) -> str:
    """What is wrong with a request, in a sentence that begins with the field, or "the body"."""
    faults = [(_path_of(one), one) for one in error.errors()]
    # Where a field takes several types, the client meant the one whose error lies deepest.
    meant = [one for one in faults if one[0][: len(faults[0][0])] == faults[0][0]]
    path, found = max(meant, key=lambda one: (len(one[0]), "".join(one[0][-1:]).zfill(9)))
    said = [one["msg"].removeprefix("Value error, ") for other, one in meant if other == path]
    name, kind = ".".join(path), found["type"]
    if kind == "json_invalid" and len(found["loc"]) < 3:  # or the JSON is in a field
        return f"the body is not JSON: {found['ctx']['error']}."
    if not path and kind != "value_error":
        return "the body is no JSON object with Content-Type: application/json."
    plain = {"missing": "is missing", "extra_forbidden": "is not supported"}.get(kind, "")
    if plain or not path:
        return f"{name} {plain or said[0]}.".lstrip()
    given = json.dumps(found["input"], ensure_ascii=False)
    given = given if len(given) < 64 else f"{given[:60]}..."
    if not _EXPECTED.match(said[0]):
        return f"{name} is {given}: {said[0]}."
    return f"{name} is {given}, expected {_EXPECTED.sub('', ' or '.join(dict.fromkeys(said)))}."


def _path_of(fault: dict[str, Any]) -> list[str]:
    """The path to what is wrong: fields and indices."""
    parts = [str(part)[:80] for part in fault["loc"][1:]]
    last = len(parts) - 1 if fault["type"] == "extra_forbidden" else -1
    return [part for n, part in enumerate(parts) if n == last or _NAMES.fullmatch(part)]
