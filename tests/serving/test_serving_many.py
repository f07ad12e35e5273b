"""256 clients at once, 40 of them hostile: the others get the same answers as alone."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from serving.test_serving_http import CHATS, REFUSED, TEXT, WRONG_CHATS, app_of, as_json, pieces

ASKED = CHATS["at once"]
LONG = [["ab"] * 64, "x" * 1000, ["ab"] * 20_000]
EXTREME: list[dict[str, Any]] = [*REFUSED["extreme"], *({"stop": stop} for stop in LONG)]


def answer(client: httpx.Client, body: dict[str, Any], **more: Any) -> httpx.Response:
    path = "chat/completions" if "messages" in body else "completions"
    return client.post(path, **as_json({"max_tokens": 3} | body | more))


def said(client: httpx.Client, body: dict[str, Any], stream: bool) -> str:
    """The text of an answer, or of its pieces together."""
    found = answer(client, body, stream=stream)
    assert found.status_code == 200, found.text
    choices = [one["choices"][0] for one in (pieces(found) if stream else [found.json()])]
    parts = [one.get("text") or one.get("delta", one.get("message")) or "" for one in choices]
    return "".join(one if isinstance(one, str) else one.get("content", "") for one in parts)


def hostile(client: httpx.Client) -> list[Callable[[], bool]]:
    """40 of them, each true where it got what it deserves."""

    def refused(body: dict[str, Any]) -> bool:
        return answer(client, body).status_code == 400

    def extreme(more: dict[str, Any]) -> bool:
        return answer(client, {"prompt": TEXT} | more).status_code in (200, 400)

    def leaves(stream: bool) -> bool:
        body = as_json({"prompt": TEXT, "max_tokens": 100_000, "stream": stream})
        if stream:
            with client.stream("POST", "completions", **body) as found:
                return bool(next(found.iter_bytes()))
        with pytest.raises(httpx.TimeoutException):
            client.post("completions", **body, timeout=0.5)
        return True

    def breaks_off(sent: str) -> bool:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
            raw.sendall(sent.encode("latin-1"))
        return True

    tried: list[tuple[Callable[[Any], bool], list[Any]]] = [
        (refused, [body for body, _ in (*REFUSED["completions"][::2], *WRONG_CHATS[::2])]),
        (extreme, EXTREME), (breaks_off, REFUSED["raw"]), (leaves, [False, True] * 4),
    ]  # fmt: skip
    return [partial(act, given) for act, all in tried for given in all][-40:]


@pytest.mark.slow
def test_256_clients_of_which_40_are_hostile():
    everybody = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    with (
        app_of({"step": 256}) as (url, engine),
        httpx.Client(base_url=f"{url}/v1", limits=everybody, timeout=120) as client,
    ):
        alone = [said(client, body, False) for body in ASKED]
        assert all(alone)
        acts = hostile(client)
        found: dict[int, Any] = {}
        begin = threading.Barrier(256)

        def go(number: int) -> None:
            begin.wait()
            try:
                if number < len(acts):
                    found[number] = acts[number]()
                else:
                    which = number % len(ASKED)
                    found[number] = said(client, ASKED[which], number % 3 == 0) == alone[which]
            except Exception as error:
                found[number] = error

        with ThreadPoolExecutor(256) as pool:
            pool.map(go, range(256))
        assert len(acts) == 40 and len(found) == 256
        assert {number: what for number, what in found.items() if what is not True} == {}
        assert [said(client, body, True) for body in ASKED] == alone
        assert engine.counts["failed"] == 0 and not engine.fault
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
