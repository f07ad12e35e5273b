"""What the server refuses, and what it survives."""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx_lm.server
import pytest
from mlx_lm.models.cache import LRUPromptCache

from mlx_h2o import H2OConfig
from mlx_h2o.lm.hosting import hosting
from mlx_h2o.lm.serving import check_request
from routing_checks import mlx_lm_stays_as_it_is
from test_server import TEXT, Server, serving

__all__ = ["mlx_lm_stays_as_it_is"]  # a fixture around every test

TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
BAD: list[tuple[str, dict[str, Any], str]] = [
    (TEXTS, {"prompt": ""}, 'prompt is "", expected a text that is not empty.'),
    (TEXTS, {"prompt": ["a"]}, 'prompt is ["a"], expected a text that is not empty.'),
    (TEXTS, {}, "prompt is missing, expected a text that is not empty."),
    (TEXTS, {"prompt": "a", "stop": 5}, "stop is 5, expected a text or a list of texts"),
    (TEXTS, {"prompt": "a", "stop": ["b", ""]}, 'stop is ["b", ""], expected a text'),
    (TEXTS, {"prompt": "a", "stop": [1]}, "stop is [1], expected"),
    (TEXTS, {"prompt": "a", "seed": -1}, "seed is -1, expected a whole number from 0 to"),
    (TEXTS, {"prompt": "a", "seed": 2**64}, "seed is 18446744073709551616, expected"),
    (TEXTS, {"prompt": "a", "temperature": float("nan")}, "temperature is NaN, expected a finite"),
    (TEXTS, {"prompt": "a", "stream_options": 1}, "stream_options is 1, expected an object."),
    (TEXTS, {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias names the token -1, expected"),
    (TEXTS, {"prompt": "a", "logit_bias": {"9999999": 1}}, "logit_bias names the token 9999999"),
    (CHATS, {"messages": []}, "messages is [], expected a list that is not empty."),
    (CHATS, {"messages": {"a": 1}}, 'messages is {"a": 1}, expected a list'),
    (CHATS, {"messages": [USER, 3]}, "messages[1] is 3, expected an object with a role"),
    (CHATS, {"messages": [{"content": "a"}]}, 'messages[0] is {"content": "a"}, expected'),
    (CHATS, {"messages": [{"role": "user", "content": 1}]}, "messages[0] is"),
    (CHATS, {"messages": [{"role": "user", "content": ["a"]}]}, "messages[0] is"),
    (CHATS, {"messages": [USER], "tools": {}}, "tools is {}, expected a list."),
]


# A biased token is known once there is a tokenizer.
@pytest.mark.parametrize(
    ("path", "body", "message"), [case for case in BAD if "logit_bias" not in case[1]]
)
def test_what_is_wrong_is_said(path: str, body: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as said:
        check_request(body, chat=path == CHATS)
    assert str(said.value).startswith(message)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXTS, {"prompt": "a", "stop": None, "seed": 2**64 - 1, "temperature": 0.5}),
        (TEXTS, {"prompt": "a", "stop": ""}),
        (TEXTS, {"prompt": "a", "stop": ["b", "c"], "stream_options": {"include_usage": True}}),
        (CHATS, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]}),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    ],
)
def test_what_is_right_passes(path: str, body: dict[str, Any]) -> None:
    check_request(body, chat=path == CHATS)


def post(server: Server, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    """The status and the answer to what may be no request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    given = {"Content-Type": "application/json", "Content-Length": str(len(body))} | headers
    connection.request("POST", path, body, given)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


@pytest.mark.slow
@pytest.mark.downstream
def test_bad_requests_get_a_sentence_and_the_next_an_answer(tmp_path) -> None:
    with serving(tmp_path, "") as server:
        for path, body, message in BAD:
            status, said = post(server, path, json.dumps(body).encode())
            assert status == 400 and said["error"].startswith(message), (body, status, said)
        status, said = post(server, TEXTS, b"\xff{}")
        assert (status, said) == (400, {"error": "the body is not UTF-8, expected JSON."})
        status, said = post(server, TEXTS, b"{}", **{"Content-Length": "-5"})
        assert (status, said["error"]) == (400, "Content-Length is -5, expected 0 or more.")
        status, said = post(server, TEXTS, b"{}", **{"Content-Length": "9" * 12})
        assert (status, said["error"].partition(", ex")[2]) == (413, "pected at most 67,108,864.")
        status, said = post(server, TEXTS, b"[" * 200_000)
        assert (status, said["error"]) == (400, "the body is nested too deeply.")
        status, said = post(server, TEXTS, b'{"prompt": "a", "model": "/no/such/folder"}')
        assert status in (400, 404) and "/no/such/folder" in said["error"]
        assert server.ask(TEXT)["usage"]["completion_tokens"] == 12


class Flags(argparse.Namespace):
    """Those of the server; what is not given is None."""

    def __getattr__(self, name: str) -> None:
        return None


SETTINGS = H2OConfig(max_kv_size=24, sink_size=2, policy="keydiff")
FLAGS = Flags(
    model="demo",
    decode_concurrency=2,
    prompt_concurrency=2,
    prefill_step_size=64,
    chat_template_args={},
)


@pytest.mark.slow
def test_generation_goes_on_behind_an_error(caplog) -> None:
    """An error that nothing foresaw ends the request that it struck, and no other."""
    with hosting(SETTINGS):

        class Struck(mlx_lm.server.ResponseGenerator):
            def _make_state_machine(self, key: Any, tokenizer: Any, stop_words: Any) -> Any:
                if stop_words == ["fault"]:
                    raise LookupError("a fault")
                return super()._make_state_machine(key, tokenizer, stop_words)

        generator = Struck(mlx_lm.server.ModelProvider(FLAGS), LRUPromptCache(2))
        try:
            assert len(answered(generator, [])) == 4
            with pytest.raises(RuntimeError, match="generation failed: a fault"):
                answered(generator, ["fault"])
            assert len(answered(generator, [])) == 4
            assert generator.is_healthy
        finally:
            generator.stop_and_join()
    assert "generation failed" in caplog.text


def test_who_goes_away_leaves_no_rows(monkeypatch) -> None:
    """While the others go on with theirs."""
    server, batches = mlx_lm.server, []
    make = server.BatchGenerator

    def kept(*args: Any, **given: Any) -> Any:
        batches.append(make(*args, **given))
        return batches[-1]

    monkeypatch.setattr(server, "BatchGenerator", kept)
    with hosting(SETTINGS):
        generator = server.ResponseGenerator(server.ModelProvider(FLAGS), LRUPromptCache(2))
        try:
            stays, tokens = asked(generator, [], max_tokens=100_000)
            goes, others = asked(generator, [], max_tokens=100_000)
            next(tokens), next(others)
            (batch,) = batches
            assert len(batch._generation_batch) == 2
            both = batch.prompt_cache_nbytes
            goes.stop()
            wait_until(lambda: len(batch._generation_batch) == 1)
            next(tokens)
            assert 0 < batch.prompt_cache_nbytes < both
            stays.stop()
            wait_until(lambda: len(batch._generation_batch) == 0)
            assert batch.prompt_cache_nbytes == 0
        finally:
            generator.stop_and_join()


def wait_until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def answered(generator: Any, stop_words: list[str]) -> list[Any]:
    _, tokens = asked(generator, stop_words, max_tokens=4)
    return list(tokens)


def asked(generator: Any, stop_words: list[str], max_tokens: int) -> tuple[Any, Iterator[Any]]:
    server = mlx_lm.server
    args = server.GenerationArguments(
        model=server.ModelDescription("default_model", "default_model", None),
        sampling=server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.0),
        logits=server.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
        stop_words=stop_words,
        max_tokens=max_tokens,
        num_draft_tokens=0,
        logprobs=False,
        top_logprobs=-1,
        seed=None,
        chat_template_kwargs=None,
    )
    request = server.CompletionRequest("text", TEXT, [], None, None)
    return generator.generate(request, args)
