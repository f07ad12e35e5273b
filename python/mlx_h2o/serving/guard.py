"""Admit requests by their headers alone (host, origin, API key), and limit the size of bodies.

A browser lets any web page send requests to this machine; the host and origin headers tell these
from local requests.
"""

import contextlib
import ipaddress
import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from .answers import failure

_LOCAL = {"localhost", "127.0.0.1", "::1"}
_OPEN = {"/health", "/openapi.json"}  # paths that need no key
_MOST = 1 << 20  # values in a body; texts and lists count 8 times, objects 32 times


class Guard(CORSMiddleware):
    """Refuses requests before the application sees them, and tells browsers that pages of allowed
    origins may read answers.

    Args:
        app: the ASGI application that it guards.
        hosts: names of this server for clients, besides addresses and localhost; "*": any.
        origins: origins whose pages may ask, such as https://example.org, or their host names,
            besides this machine's; "*": any.
        key: the API key that clients must send; None: none is needed.
        most: bytes that a body may have.
    """

    def __init__(
        self, app: Any, hosts: Sequence[str], origins: Sequence[str], key: str | None, most: int
    ) -> None:
        anything: Any = {"allow_methods": ["*"], "allow_headers": ["*"]}
        super().__init__(self._let_in, allow_origin_regex=".*", **anything)
        self._behind, self.key, self.most = app, key, most
        names = (one if "://" in one else f"//{one}" for one in hosts)
        self.hosts = _LOCAL | {*map(_host_of, names)}
        self.origins = {one.lower().rstrip("/") for one in origins}  # as browsers write them

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope = {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope  # sent bare
        if scope["type"] != "http":
            await self._behind(scope, receive, send)
        elif refused := self._refusal(Headers(scope=scope)):
            await JSONResponse(failure(refused), 403)(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _let_in(self, scope: Any, receive: Any, send: Any) -> None:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        right = secrets.compare_digest(given.encode("latin-1"), (self.key or "").encode())
        if self.key is None or (right and scheme.lower() == "bearer") or scope["path"] in _OPEN:
            await self._behind(scope, self._counted(receive), send)
            return
        said = "the API key is missing or wrong, expected the server's --api-key."
        await JSONResponse(failure(said, 401, code="invalid_api_key"), 401)(scope, receive, send)

    def _refusal(self, headers: Headers) -> str:
        host, origin = _host_of(f"//{headers.get('host', '')}"), headers.get("origin")
        known: Any = {"*", host} & self.hosts or "host" not in headers  # every browser names one
        with contextlib.suppress(ValueError):  # an address cannot be rebound, as a name can
            known = known or ipaddress.ip_address(host)
        if not known:
            return f"the host {host!r} is not served: expected --allowed-hosts to name it."
        own = (origin or "").partition("://")[2] == headers.get("host")
        if own or origin is None or {"*", origin, _host_of(origin)} & (self.origins | _LOCAL):
            return ""
        return f"the origin {origin!r} is not served: expected --allowed-origins to name it."

    def _counted(self, receive: Any) -> Any:
        size = values = within = 0  # within: 1 if a text goes on in the next part of the body
        begun = b""  # of an escape

        async def counted() -> Any:
            nonlocal size, values, within, begun
            message = await receive()
            part = message.get("body", b"")
            plain = (begun + part).replace(rb"\\", b"")
            if b"\0" in part:  # the commas and brackets of UTF-16 would not be counted
                raise HTTPException(400, failure("the body is not JSON in UTF-8."))
            begun = plain[-1:] if plain.endswith(b"\\") else b""
            texts = plain.replace(rb"\"", b"").split(b'"')
            rest = b"".join(texts[within::2])
            within = (within + len(texts) - 1) % 2
            size += len(part)
            values += rest.count(b",") + 4 * (len(texts) - 1)
            values += 8 * rest.count(b"[") + 32 * rest.count(b"{")
            for found, most, what in ((size, self.most, "bytes"), (values, _MOST, "values")):
                if found > most:
                    said = f"the body has {found:,} {what} or more, expected at most {most:,}."
                    raise HTTPException(413, failure(said))
            return message

        return counted


def _host_of(url: str) -> str:
    with contextlib.suppress(ValueError):
        return urlsplit(url).hostname or ""
    return ""
