"""Templates, tool calls and thoughts of the common families, in generate, chat and server."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_h2o
from chat_families import FAMILIES, saved
from mlx_h2o import cli
from mlx_h2o.serving.answers import ChatChoice
from mlx_h2o.serving.request import Event, Request
from mlx_h2o.serving.schema import ChatBody
from mlx_h2o.serving.text import Writer
from serving.test_serving_http import CHATS

TOOLS, ASKED, TURNS = (CHATS[name] for name in ("tools", "asked", "turns"))


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Any:
    """A family, the folder of a model of it, and its tokenizer."""
    family = FAMILIES[request.param]
    folder = saved(family, tmp_path_factory.mktemp("model"))
    return family, folder, mlx_h2o.load(folder)[1]


def body(family: Any, **more: Any) -> ChatBody:
    given = {"tools": TOOLS, "messages": ASKED + TURNS} if family.calls else {"messages": ASKED}
    return ChatBody(**(given | more))


def test_the_server_reads_what_the_template_says(served: Any) -> None:
    family, _, tokenizer = served
    [(tokens, state)] = body(family).encoded(tokenizer, {})
    text, at = tokenizer.decode(tokens), 0
    for part in family.holds:
        at = text.index(part, at) + len(part)
    assert state == ("reasoning" if family.thinks else "normal")
    assert tokens[0] != tokens[1]  # no token begins it twice
    asked = body(family)
    asked.messages[0].role = "developer"  # which templates do not know
    assert asked.encoded(tokenizer, {})[0][0] == tokens
    turn = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert ChatBody(messages=[turn]).messages[0].for_template() == turn


def told(served: Any, count: int = sys.maxsize, *stops: str) -> tuple[dict[str, Any], list[Any]]:
    """The choice of this many tokens of the family's answer, and its pieces."""
    family, _, tokenizer = served
    asked = body(family)
    request = Request([1], print, max_tokens=count)
    choice = ChatChoice(0, tokenizer, asked.tools_given)
    request._writer = Writer(tokenizer, stops, asked.encoded(tokenizer, {})[0][1])
    written = tokenizer.encode(family.answer, add_special_tokens=False)[:count]
    pieces = []
    for token in written:
        event = request.take(tokenizer, token, mx.array(0))
        pieces.append(choice.take(event)["delta"])
        if event.finish is not None:
            return choice.whole, pieces
    raise AssertionError("it does not end")


def test_a_call_that_is_cut_is_told_as_text(served: Any) -> None:
    """Wherever that is; and not as its beginning, and with no mark that the model has not made."""
    family, _, tokenizer = served
    *words, _ = tokenizer.encode(family.answer, add_special_tokens=False)
    end = (family.calls and tokenizer.tool_call_end) or "none"
    for count in range(1, len(words)):
        whole, pieces = told(served, count)
        text, message = tokenizer.decode(words[:count]), whole["message"]
        assert whole["finish_reason"] == "length"
        assert ("tool_calls" in message) == any("tool_calls" in one for one in pieces)
        assert ("tool_calls" in message) == (end in text)
        content = "".join(one.get("content", "") for one in pieces)
        assert (message["content"] or "") == content and content in text
    if family.calls:
        whole, _ = told(served, sys.maxsize, "Bonn")
        assert whole["finish_reason"] == "stop" and "tool_calls" not in whole["message"]
        assert family.answer.partition("Bonn")[0].endswith(whole["message"]["content"])


def test_text_before_a_stop_may_look_like_the_beginning_of_a_mark(tmp_path: Path) -> None:
    tokenizer = mlx_h2o.load(saved(FAMILIES["qwen3"], tmp_path))[1]
    request = Request([1], print, stops=["t"])
    events = [request.take(tokenizer, token, mx.array(0)) for token in tokenizer.encode("1 <t")]
    assert [text for event in events for _, text in event.segments] == ["1", " ", "<"]
    assert events[-1].finish == "stop"


def test_the_server_tells_thoughts_text_and_calls_apart(served: Any) -> None:
    family, _, _ = served
    whole, pieces = told(served)
    message = whole["message"]
    assert message["content"] == family.content
    assert message.get("reasoning", "") == family.reasoning
    assert "".join(one.get("content", "") for one in pieces) == family.content
    assert "".join(one.get("reasoning", "") for one in pieces) == family.reasoning
    calls = message.get("tool_calls", [])
    expected = [{"city": "Bonn"}] if family.calls else []
    assert [json.loads(one["function"]["arguments"]) for one in calls] == expected
    streamed = [one for piece in pieces for one in piece.get("tool_calls", [])]
    assert streamed == [one | {"index": place} for place, one in enumerate(calls)]
    assert whole["finish_reason"] == ("tool_calls" if family.calls else "stop")


def test_tools_are_refused_where_nothing_reads_their_calls(served: Any) -> None:
    family, _, tokenizer = served
    assert not body(family, tool_choice="none").tools_given
    if not family.calls:
        with pytest.raises(ValueError, match="knows no tools"):
            body(family, tools=TOOLS).encoded(tokenizer, {})


def test_generate_and_chat_read_it_too(
    served: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder, tokenizer = served
    [(tokens, _)] = ChatBody(messages=ASKED).encoded(tokenizer, {})
    common = ["--model", folder, "--max-tokens", "2", "--max-kv-size", "64"]
    common += ["--system-prompt", "Be brief."]
    assert cli.main(["generate", *common, "--prompt", "Rain?"]) == 0
    assert f"Prompt: {len(tokens)} tokens" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Rain?\nq\n")))
    assert cli.main(["chat", *common]) == 0
    assert " tokens · " in capsys.readouterr().out


def test_a_template_can_be_told_not_to_think(tmp_path: Path) -> None:
    tokenizer = mlx_h2o.load(saved(FAMILIES["smollm3"], tmp_path))[1]
    asked = ChatBody(messages=ASKED, chat_template_kwargs={"enable_thinking": False})
    assert "/no_think" in tokenizer.decode(asked.encoded(tokenizer, {})[0][0])
    asked = ChatBody(messages=[{"role": "user", "content": "What is <think>?"}])
    assert asked.encoded(tokenizer, {})[0][1] == "normal"  # nobody thinks yet


@pytest.mark.parametrize(
    ("tools", "text"),
    [([], f"{CHATS['no calls'][1]}</tool_call>."), *((TOOLS, text) for text in CHATS["no calls"])],
)
def test_what_is_no_call_is_text(tools: Any, text: str, tmp_path: Path, caplog: Any) -> None:
    """One that nobody asked for, that ends before its own end, or with arguments that cannot be
    read, here or by a client, or not be sent back."""
    tokenizer = mlx_h2o.load(saved(FAMILIES["qwen2.5"], tmp_path))[1]
    writer, choice = Writer(tokenizer, ()), ChatChoice(0, tokenizer, tools)
    for token in tokenizer.encode(text, add_special_tokens=False):
        choice.take(Event(writer.take(token)))
    choice.take(Event(writer.end(), finish="stop"))
    assert choice.whole["message"] == {"role": "assistant", "content": text}
    assert choice.whole["finish_reason"] == "stop" and "cannot be read" in caplog.text
