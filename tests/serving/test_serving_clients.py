"""LangChain's client, used as its users do; test_serving_http.py covers openai's client."""

from typing import Any

import pytest

from serving.test_serving_http import CHAT, TEXT, chat, post, said
from serving.test_serving_json import SCHEMA


@pytest.fixture
def given(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    where = {"base_url": f"{url}/v1", "api_key": "none", "model": "demo"}
    return where | {"temperature": 0, "max_retries": 0}


@pytest.mark.slow
def test_langchain_chats(url: str, given: dict[str, Any]) -> None:
    import openai
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(**given, max_completion_tokens=6)
    expected = chat(url, max_tokens=6)["choices"][0]["message"]["content"]
    messages = [(one["role"], one["content"]) for one in CHAT]
    found = model.invoke(messages)
    assert found.content == expected and found.usage_metadata["output_tokens"] == 6
    assert found.response_metadata["finish_reason"] == "length"
    assert "".join(part.content for part in model.stream(messages)) == expected
    assert [one.content for one in model.batch([messages] * 3)] == [expected] * 3
    likely = model.bind(logprobs=True, top_logprobs=2).invoke(messages)
    assert len(likely.response_metadata["logprobs"]["content"]) == 6
    schema = {"title": "Thing", "description": "", **SCHEMA}
    longer = ChatOpenAI(**given, max_completion_tokens=120)
    thing = longer.with_structured_output(schema, method="json_schema")
    assert set(thing.invoke(messages)) == {"name", "age", "kind"}
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        model.bind_tools([{"name": "f", "description": "", "parameters": {}}]).invoke(messages)


@pytest.mark.slow
def test_langchain_completes(url: str, given: dict[str, Any]) -> None:
    from langchain_openai import OpenAI

    model = OpenAI(**given, max_tokens=6)
    expected = said(post(url, {"prompt": TEXT, "max_tokens": 6}).json())
    assert model.invoke(TEXT) == expected == "".join(model.stream(TEXT))
    assert model.generate([TEXT, TEXT[:40]]).generations[0][0].text == expected
