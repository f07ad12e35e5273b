"""Who may ask at all: hosts and origins by name, and bodies of a bearable size.

A page of another site that a browser shows may send requests here; the names of host and origin
tell them from those of this machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from .answers import failure

__all__ = ["Guard"]

_LOCAL = {"localhost", "127.0.0.1", "::1"}


class Guard:
    """Answers requests that nobody else shall see; an ASGI application around another.

    Args:
        app: the other.
        hosts: names under which this server may be asked, beside addresses and localhost; "*": any.
        origins: origins whose pages may ask, such as https://example.org, beside this machine's;
            "*": any.
        most: bytes of a body.
    """

    def __init__(self, app: Any, hosts: Sequence[str], origins: Sequence[str], most: int) -> None:
        self.app, self.most = app, most
        self.hosts, self.origins = {*hosts, *_LOCAL}, set(origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            if refused := self._refusal(Headers(scope=scope)):
                await JSONResponse(failure(refused), 403)(scope, receive, send)
                return
            receive = self._counted(receive)
        await self.app(scope, receive, send)

    def _refusal(self, headers: Headers) -> str:
        host, origin = _host_of(f"//{headers.get('host', '')}"), headers.get("origin")
        known: Any = {"*", host} & self.hosts
        with contextlib.suppress(ValueError):  # an address cannot point elsewhere, as a name can
            known = known or ipaddress.ip_address(host)
        if not known:
            return f"the host {host!r} is not served: expected --allowed-hosts to name it."
        own = (origin or "").partition("://")[2] == headers.get("host")
        if own or origin is None or {"*", origin} & self.origins or _host_of(origin) in _LOCAL:
            return ""
        return f"the origin {origin!r} is not served: expected --allowed-origins to name it."

    def _counted(self, receive: Any) -> Any:
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                said = f"the body has {seen:,} bytes or more, expected at most {self.most:,}."
                raise HTTPException(413, failure(said))
            return message

        return counted


def _host_of(url: str) -> str:
    with contextlib.suppress(ValueError):
        return urlsplit(url).hostname or ""
    return ""
