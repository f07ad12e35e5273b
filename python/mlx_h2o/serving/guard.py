"""Who may ask at all: hosts and origins by name, and bodies of a bearable size.

A page of another site that a browser shows may send requests here; the names of host and origin
tell them from those of this machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

from .answers import failure

__all__ = ["Guard", "is_local"]

_LOCAL = ("localhost", "127.0.0.1", "::1")


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
        self.hosts, self.origins = set(hosts), set(origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if refused := self._refusal(headers):
            await _refuse(*refused, scope, receive, send)
            return
        seen, begun, over = 0, False, False

        async def counted() -> Any:
            nonlocal seen, over
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                over = True
                return {"type": "http.disconnect"}
            return message

        async def unless_over(message: Any) -> None:
            nonlocal begun
            if over and not begun:
                return
            begun = True
            await send(message)

        try:
            await self.app(scope, counted, unless_over)
        except Exception:
            if not over:
                raise
        if over and not begun:
            await _refuse(413, self._too_long(seen), scope, receive, send)

    def _refusal(self, headers: dict[str, str]) -> tuple[int, str] | None:
        host = _host_of(f"//{headers.get('host', '')}")
        if not ("*" in self.hosts or host in self.hosts or is_local(host) or _is_address(host)):
            return 403, f"the host {host!r} is not served: expected --allowed-hosts to name it."
        origin = headers.get("origin")
        if origin is not None and not (
            {"*", origin} & self.origins
            or is_local(_host_of(origin))
            or origin.partition("://")[2] == headers.get("host")
        ):
            return 403, (
                f"the origin {origin!r} is not served: expected --allowed-origins to name it."
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.most:
            return 413, self._too_long(int(length[:20]))
        return None

    def _too_long(self, found: int) -> str:
        return f"the body has {found:,} bytes or more, expected at most {self.most:,}."


def is_local(host: str) -> bool:
    """Whether a name is this machine's."""
    return host in _LOCAL


def _is_address(host: str) -> bool:
    """An address cannot be made to point elsewhere, as a name can."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


async def _refuse(status: int, message: str, scope: Any, receive: Any, send: Any) -> None:
    await JSONResponse(failure(message), status)(scope, receive, send)
