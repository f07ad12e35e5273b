"""The server over HTTP: what it answers, what it refuses, and its messages."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import uvicorn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from pydantic import ValidationError
from starlette.responses import StreamingResponse

import plain_http as httpx
from engines import SAID as TEXT
from engines import demo, engine_of, fail
from mlx_h2o.serving.guard import Guard
from mlx_h2o.serving.http import ServerSettings, make_app
from mlx_h2o.serving.listening import listen
from mlx_h2o.serving.schema import ChatBody, CompletionBody
from mlx_h2o.serving.text import Writer

JSON = {"Content-Type": "application/json"}
CHAT = [{"role": "user", "content": "What is the sea?"}]


@contextmanager
def app_of(limits: dict[str, Any] | None = None, **settings: Any) -> Iterator[Any]:
    """The address of a server of the demo model, and its engine."""
    model, tokenizer = demo()
    with engine_of([model], tokenizer, limits=limits or {"step": 256}) as engine:
        listener = listen("127.0.0.1", 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # a reader is soon late
        app = make_app(engine, ServerSettings("demo", **{"max_tokens": 8} | settings))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_keep_alive=75))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", engine
        finally:
            server.should_exit = True
            thread.join()


def post(url: str, body: Any, path: str = "completions", **headers: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=60)


def chat(url: str, **body: Any) -> dict[str, Any]:
    answer = post(url, {"messages": CHAT} | body, "chat/completions")
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def pieces(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_whole_answers_and_streams_say_the_same(url):
    body = {"prompt": TEXT, "max_tokens": 12, "logprobs": 2}
    whole = post(url, body).json()
    usage = whole["usage"]
    assert usage["completion_tokens"] == 12 and usage["total_tokens"] == usage["prompt_tokens"] + 12
    stream = pieces(post(url, body | {"stream": True, "stream_options": {"include_usage": True}}))
    *told, last = stream
    assert "".join(map(said, told)) == said(whole)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert [one["choices"][0]["finish_reason"] for one in told][-1] == "length"
    parts = [one["choices"][0]["logprobs"] for one in told if one["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        together = [value for part in parts for value in part[name]]
        expected = whole["choices"][0]["logprobs"][name]
        assert together == (pytest.approx(expected, abs=1e-3) if "logprobs" in name else expected)


def test_a_stop_ends_whole_answers_and_streams(url):
    body = {"prompt": TEXT, "max_tokens": 30}
    text = said(post(url, body).json())
    for start, size in ((3, 4), (9, 1), (14, 9)):
        stop = text[start : start + size]
        expected = text[: text.index(stop)]
        found = post(url, body | {"stop": ["never there", stop]}).json()
        assert said(found) == expected and found["choices"][0]["finish_reason"] == "stop"
        told = pieces(post(url, body | {"stop": stop, "stream": True}))
        assert "".join(map(said, told)) == expected
    assert text in said(post(url, body | {"stop": text + "!", "max_tokens": 31}).json())


def test_others_are_answered_while_prompts_become_tokens(url, monkeypatch):
    """And those with short texts while a long one does, whose turn nobody gets who has left."""
    begun, go, read = threading.Event(), threading.Event(), set[str]()

    def slow(_: Any, text: str) -> list[int]:
        read.add(text[0])
        return [6] if len(text) < 1000 else begun.set() or (go.wait(30) and [5])

    monkeypatch.setattr(TokenizerWrapper, "encode", slow, raising=False)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, url, {"prompt": ["a" * 2000] * 64, "max_tokens": 1})
        assert begun.wait(30) and httpx.get(f"{url}/health").status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={"prompt": "left" * 30_000}, timeout=0.5)
        assert post(url, {"prompt": TEXT, "max_tokens": 1}).status_code == 200
        assert not asked.done()
        go.set()
        assert len(asked.result().json()["choices"]) == 64
        assert post(url, {"prompt": "n" * 99_999, "max_tokens": 1}).status_code == 200
        assert "n" in read and "l" not in read


def test_choices_and_seeds(url):
    body = {"prompt": [TEXT, "The ship"], "n": 2, "temperature": 1.0, "seed": 7}
    first, again = post(url, body).json(), post(url, body).json()
    texts = [one["text"] for one in first["choices"]]
    assert texts == [one["text"] for one in again["choices"]] and len(set(texts)) == 4
    assert [one["index"] for one in first["choices"]] == [0, 1, 2, 3]
    own = [post(url, {**body, "prompt": one, "n": 1}).json() for one in body["prompt"]]
    assert [*map(said, own)] == texts[::2] and first["usage"]["completion_tokens"] == 32
    assert first["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in own)
    least, same = (post(url, {**body, "seed": one}).json() for one in (-1 << 63, 1 << 63))
    assert least["choices"] == same["choices"] != first["choices"]


def test_null_is_absent(url):
    body = {"prompt": TEXT, "max_tokens": 4}
    names = "temperature top_p stream logprobs n seed stop logit_bias model presence_penalty "
    names += "frequency_penalty stream_options user top_k"
    expected = said(post(url, body).json())
    assert said(post(url, body | dict.fromkeys(names.split())).json()) == expected
    chat(url, **dict.fromkeys(("top_logprobs", "tools", "tool_choice", "response_format")))
    chat(url, chat_template_kwargs={"documents": [{"text": "a"}]})
    assert pieces(post(url, body | {"stream": True, "stream_options": {}}))


CHATS = json.loads(Path(__file__).with_name("chats.json").read_text("ascii"))
REFUSED = json.loads(Path(__file__).with_name("wrong_requests.json").read_text("ascii"))
WRONG = REFUSED["completions"]
WRONG_CHATS = [({"messages": CHAT} | body, said) for body, said in REFUSED["chats"]]


@pytest.mark.parametrize(("body", "message"), [*WRONG, *WRONG_CHATS])
def test_a_wrong_request_is_refused_in_a_sentence(url, body, message):
    path = "chat/completions" if "messages" in body else "completions"
    check_refused(httpx.post(f"{url}/v1/{path}", **as_json(body)), message)


def as_json(body: Any) -> dict[str, Any]:
    return {"content": json.dumps(body), "headers": JSON}


def check_refused(answer: httpx.Response, message: str, status: int = 400) -> Any:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert message in error["message"] and set(error) == {"message", "type", "param", "code"}
    assert status != 400 or error["message"].startswith(error["param"] or "the body ")
    return error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *REFUSED["bodies"], ("9" * 5000, "the body cannot be read: Exceeds the limit"),
        ("[" * 100_000, "the body cannot be read: it is nested too deeply"),
    ],
)  # fmt: skip
def test_a_body_that_is_no_request(url, content, message):
    answer = httpx.post(f"{url}/v1/completions", content=content.encode("latin-1"), headers=JSON)
    assert check_refused(answer, message)["param"] == ("prompt" if "NaN" in content else None)


def test_a_body_of_too_many_values_is_refused(url, monkeypatch):
    """Others would wait while they are checked. A text is one value, wherever it is cut."""
    monkeypatch.setattr("mlx_h2o.serving.guard._MOST", 1000)
    for values in ([1] * 1001, ["a"] * 112, [[]] * 112, [{}] * 31):
        check_refused(post(url, {"prompt": values}), "values or more, expected at most 1,000", 413)
    text = json.dumps({"prompt": '\\",{["' * 300, "stop": "\\"}).encode()
    for size in (1, 2, 7, len(text)):
        parts = [{"body": text[at : at + size]} for at in range(0, len(text), size)]
        receive = Guard(None, [], [], None, 1 << 20)._counted(AsyncMock(side_effect=parts))
        for _ in parts:
            asyncio.run(receive())


def test_a_body_of_any_depth_is_refused_in_a_sentence(url):
    said = set()
    for depth in range(900, 1000, 2):
        body = f'{{"stop": {"[" * depth}{"]" * depth}}}'
        answer = httpx.post(f"{url}/v1/completions", content=body, headers=JSON)
        said.add(check_refused(answer, "")["message"][:22])
    assert said == {"stop.0 is [[[[[[[[[[[[", "stop is nested too dee", "the body cannot be rea"}


MANY = {f"f{n}": "a" for n in range(1000)}


@pytest.mark.parametrize("body", [MANY, {"messages": [MANY]}, {"logit_bias": MANY}])
def test_of_many_faults_one_is_told(body):
    """Or a thousand others would wait for their texts."""
    with pytest.raises(ValidationError) as error:
        (ChatBody if "messages" in body else CompletionBody)(**body)
    assert error.value.error_count() <= 2  # one field may be missing


def test_one_model_is_served(url):
    assert [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]] == ["demo"]
    assert httpx.get(f"{url}/v1/models/demo").json()["id"] == "demo"
    for name in ("/etc", "gpt-4", "mlx-community/none", ""):
        answer = post(url, {"model": name, "prompt": "a"})
        check_refused(answer, "is not served, expected 'demo'", 404)
        assert answer.json()["error"]["code"] == "model_not_found"
    check_refused(httpx.get(f"{url}/v1/models//etc"), "is not served", 404)
    for name in ("demo", "default_model"):
        assert post(url, {"model": name, "prompt": "a", "max_tokens": 1}).status_code == 200
    check_refused(httpx.get(f"{url}/v1/none"), "Not Found: GET /v1/none", 404)
    for path, status in (("health", 200), ("v1/models", 200), ("v1/completions", 405)):
        answer = httpx.head(f"{url}/{path}")
        assert (answer.status_code, answer.content) == (status, b"")


@pytest.mark.parametrize(("headers", "status"), REFUSED["hosts"])
def test_hosts_and_origins(named, headers, status):
    answer = post(named, {"prompt": "a", "max_tokens": 1}, **headers, Authorization="bearer secret")
    assert answer.status_code == status
    if "Origin" in headers and status == 200 and "Host" not in headers:
        assert answer.headers["access-control-allow-origin"] == headers["Origin"]


KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def named() -> Iterator[str]:
    hosts, origins = ["My.Host:80", "https://a.host"], ["https://Page.example/", "other.example"]
    with app_of(hosts=hosts, origins=origins, api_key="secret", most_bytes=1000) as (url, _):
        yield url


def test_an_api_key_and_a_limit_of_bytes(named):
    check_refused(post(named, {"prompt": "a"}), "the API key is missing", 401)
    for wrong in ("Bearer other", "Bearer asecret", "Bearer secret2", "Basic secret"):
        check_refused(post(named, {"prompt": "a"}, Authorization=wrong), "API key", 401)
    check_refused(httpx.get(f"{named}/metrics"), "API key", 401)
    assert httpx.get(f"{named}/health").status_code == 200
    check_refused(post(named, {"prompt": "a" * 2000}, **KEY), "expected at most 1,000", 413)
    parts = (b"a" * 400 for _ in range(5))  # in chunks, of which the length is not told
    answer = httpx.post(f"{named}/v1/completions", content=parts, headers=JSON | KEY)
    check_refused(answer, "expected at most 1,000", 413)
    with raw_of(named, b"Content-Length: 900\r\n\r\n{") as raw:  # the rest never comes
        assert b" 401 " in raw.recv(100)
    with socket.create_connection(("127.0.0.1", int(named.rpartition(":")[2]))) as raw:
        raw.sendall(b"GET /health HTTP/1.0\r\n\r\n")  # as load balancers ask, without a host
        assert b" 200 " in raw.recv(100)
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert httpx.options(f"{named}/v1/completions", headers=asked).status_code == 200


def raw_of(url: str, more: bytes) -> socket.socket:
    """A connection with a request for a completion, of which this is the rest."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(60)
    raw.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw.sendall(head.encode() + more)
    return raw


@pytest.mark.parametrize(("limit", "most", "is_all"), [("_UNREAD", 200, 1), ("_PATIENCE", 1, 0)])
def test_an_answer_that_is_not_read_is_given_up(limit, most, is_all, monkeypatch):
    """This many pieces, or seconds."""
    monkeypatch.setattr(f"mlx_h2o.serving.http.{limit}", most)
    with app_of() as (url, engine):
        body = {"prompt": "a", "n": 16, "max_tokens": 20_000, "stream": True, "logprobs": 20}
        sent = json.dumps(body).encode()
        with raw_of(url, b"Content-Length: %d\r\n\r\n%s" % (len(sent), sent)) as raw:
            begun, told = time.monotonic(), b""
            while engine.counts["left"] < 16:
                assert said(post(url, {"prompt": TEXT, "max_tokens": 2}).json())
                assert time.monotonic() - begun < 60
            while b"[DONE]" not in told[-100:]:
                told += raw.recv(1 << 20)
        assert b" pieces of it were not read" in told.partition(b"generation failed: ")[2]
        assert is_all == (b"generation failed: 200 pieces of it were not read" in told)


def test_failures_are_told_and_the_server_goes_on(monkeypatch):
    original = Writer.take

    def failing(self, token):
        return fail() if self.stops == ("fail",) else original(self, token)

    monkeypatch.setattr(Writer, "take", failing)
    with app_of() as (url, engine):
        body = {"prompt": TEXT, "stop": "fail"}
        check_refused(post(url, body), "generation failed: it fails", 500)
        stream = post(url, body | {"stream": True})
        assert stream.status_code == 200
        assert pieces(stream)[-1]["error"]["message"] == "generation failed: it fails"
        assert said(post(url, {"prompt": TEXT}).json())
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        engine._lone_failures = 3
        assert httpx.get(f"{url}/health").status_code == 503
        text = httpx.get(f"{url}/metrics").text
        assert "mlx_h2o_failed_total 2.0" in text and "mlx_h2o_healthy 0.0" in text
        for name in ("first_token", "answer"):
            assert f"mlx_h2o_{name}_seconds_count 1.0" in text


@pytest.mark.parametrize("stream", [False, True, "never begun"])
def test_a_client_that_leaves(stream, monkeypatch):
    if stream == "never begun":
        monkeypatch.setattr(StreamingResponse, "stream_response", lambda *_: asyncio.sleep(60))
    with app_of() as (url, engine):
        body = {"prompt": TEXT, "max_tokens": 100_000, "stream": bool(stream)}
        asked = httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=1.5)
        with pytest.raises(httpx.ReadTimeout), asked as answer:
            if stream:
                next(answer.iter_lines())
                raise httpx.ReadTimeout("enough")
            answer.read()
        begun = time.monotonic()
        while engine.running and time.monotonic() - begun < 5:
            time.sleep(0.02)
        assert engine.running == 0 and engine.counts["left"] == 1


def test_a_queue_that_is_full():
    with app_of({"decode": 1, "prompts": 1, "queue": 1, "step": 64}) as (url, _):
        body = {"prompt": TEXT, "max_tokens": 60}
        with ThreadPoolExecutor(6) as pool:
            answers = [*pool.map(post, [url] * 6, [body] * 6)]
        statuses = [one.status_code for one in answers]
        assert sorted(set(statuses)) == [200, 503] and statuses.count(200) >= 2
        full = next(one for one in answers if one.status_code == 503)
        assert int(full.headers["retry-after"]) > 0
        check_refused(full, "wait already: try again later", 503)


def test_the_openai_client(url):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    create: Any = partial(client.chat.completions.create, model="demo", messages=CHAT)
    answer = create(max_completion_tokens=6, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content and answer.usage.completion_tokens == 6
    told = answer.choices[0].logprobs.content
    assert len(told) == 6 and all(len(one.top_logprobs) == 2 for one in told)
    parts = list(create(max_tokens=6, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == answer.choices[0].message.content
    assert parts[-1].usage.completion_tokens == 6
    with pytest.raises(openai.BadRequestError, match="response_format"):
        create(response_format={"type": "yaml"})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    assert [model.id for model in client.models.list()] == ["demo"]
