"""Answers in JSON, of any object or of a schema: in batches, streamed, sampled, with drafts."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from engines import demo, engine_of, submit
from mlx_h2o.serving.grammar import matcher, vocabulary_of
from models.tiny import build
from serving.test_serving_http import CHAT, REFUSED, app_of, chat, check_refused, pieces, post

SCHEMA = REFUSED["schema"]
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
MUCH = {"max_tokens": 120, "response_format": FORMAT}


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def content(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def test_an_answer_keeps_to_its_schema_alone_and_beside_others(url):
    plain, alone = chat(url, max_tokens=30), content(chat(url, **MUCH))
    check(alone)
    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(lambda body: chat(url, **body), [{"max_tokens": 30}, MUCH] * 3)]
    assert [content(one) for one in found[1::2]] == [alone] * 3
    texts = [one["choices"][0]["message"] for one in found[::2]]
    assert texts == [plain["choices"][0]["message"]] * 3


def test_streams_and_samples_keep_to_it_too(url):
    body = {"messages": CHAT, "stream": True, "logprobs": True, "top_logprobs": 20} | MUCH
    told = pieces(post(url, body, "chat/completions"))
    streamed = "".join(one["choices"][0]["delta"].get("content") or "" for one in told)
    assert streamed == content(chat(url, **MUCH))
    hot = {"temperature": 2.0, "seed": 3, "n": 4, "repetition_penalty": 1.2}
    for choice in chat(url, **hot, **MUCH)["choices"]:
        check(choice["message"]["content"])


def test_an_object_of_any_kind(url):
    (choice,) = chat(url, response_format={"type": "json_object"}, max_tokens=200)["choices"]
    text = choice["message"]["content"]
    assert text.lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)
    plain = chat(url, max_tokens=9)["choices"]
    assert chat(url, max_tokens=9, response_format={"type": "text"})["choices"] == plain


LINKS = {f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(1000)} | {"a1000": {}}
CHAIN = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/a0", "$defs": LINKS}}}


@pytest.mark.parametrize(("given", "message"), [*REFUSED["formats"], (CHAIN, "nested too deeply")])
def test_a_wrong_format_is_refused(url, given, message):
    answer = post(url, {"messages": CHAT, "response_format": given}, "chat/completions")
    assert "response_format" in check_refused(answer, message)["message"]


def slow(divisor: int) -> dict[str, Any]:
    schema = {"schema": {"type": "integer", "multipleOf": divisor}}
    return {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": schema}}


def test_a_chat_is_answered_beside_a_slow_schema(monkeypatch):
    """Which is refused at once when it comes again, and given up when the server ends."""
    monkeypatch.setattr("mlx_h2o.serving.grammar._SECONDS", 4)
    with app_of() as (url, engine), ThreadPoolExecutor(1) as pool:
        refused = pool.submit(post, url, slow(99_999_989), "chat/completions")
        time.sleep(0.5)  # it has come, and is being tried
        assert chat(url, max_tokens=2) and not refused.done()
        check_refused(refused.result(), "takes too long")
        monkeypatch.setattr("mlx_h2o.serving.grammar._SECONDS", 30)
        check_refused(post(url, slow(99_999_989), "chat/completions"), "takes too long")
        refused = pool.submit(post, url, slow(99_999_971), "chat/completions")
        time.sleep(0.5)
        begun = time.monotonic()
        assert engine.close(10) and not refused.exception(20)
        check_refused(refused.result(), "the server is shutting down", 503)
        assert time.monotonic() - begun < 10


def test_a_model_whose_answers_never_end_refuses(monkeypatch):
    _, tokenizer = demo()
    ends = {4096, *tokenizer.eos_token_ids}
    monkeypatch.setattr(tokenizer, "_eos_token_ids", ends)
    assert vocabulary_of.__wrapped__(tokenizer, 4096).eos_token in ends
    monkeypatch.setattr(tokenizer, "_eos_token_ids", {-1, 4096})
    with pytest.raises(ValueError, match="response_format needs"):
        vocabulary_of.__wrapped__(tokenizer, 4096)


def test_a_model_that_thinks_first_refuses(url, monkeypatch):
    encoded = "mlx_h2o.serving.schema.ChatBody.encoded"
    monkeypatch.setattr(encoded, lambda *given: [([1, 2], "reasoning")])
    answer = post(url, {"messages": CHAT} | MUCH, "chat/completions")
    check_refused(answer, "response_format is given, and the model thinks")
    assert answer.json()["error"]["param"] == "response_format"


class Tiring:
    """A matcher that gives up after some tokens."""

    def __init__(self, whole: Any) -> None:
        self.whole, self.left = whole, 4

    def deep_copy(self) -> Any:
        return Tiring(self.whole.deep_copy())

    def is_error(self) -> bool:
        self.left -= 1
        return self.left < 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


def test_a_grammar_that_fails_ends_its_request_alone():
    model, tokenizer = demo()
    keeping = matcher(vocabulary_of(tokenizer, 4096), json.dumps(SCHEMA))
    with engine_of([model], tokenizer) as engine:
        alone = submit(engine, "The ship was").wait().text
        both = [submit(engine, "The ship was", grammar=one) for one in (None, Tiring(keeping))]
        assert both[0].wait().text == alone
        assert "the schema is too complex" in str(both[1].wait().error)


@pytest.mark.slow
def test_drafts_keep_to_it():
    model, tokenizer = demo()
    keeping = matcher(vocabulary_of(tokenizer, 4096), json.dumps(SCHEMA))
    given = {"max_tokens": 120, "grammar": keeping}
    with engine_of([model], tokenizer) as engine:
        expected = submit(engine, "The ship was", **given).wait()
    check(expected.text)
    for draft in (model, build("qwen3", vocab_size=4160)):  # a table that is longer
        with engine_of([model, draft], tokenizer, speculative=3) as engine:
            found = [submit(engine, "The ship was", **given) for _ in range(2)]
            assert [one.wait().text for one in found] == [expected.text] * 2
