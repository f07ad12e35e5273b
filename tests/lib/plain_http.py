"""httpx for addresses without TLS, because otherwise every call reads all certificates."""

from functools import partial

import httpx
from httpx import ReadTimeout, Response, TransportError

__all__ = ["ReadTimeout", "Response", "TransportError", "get", "options", "post", "stream"]

get, options, post, stream = (
    partial(function, verify=False)
    for function in (httpx.get, httpx.options, httpx.post, httpx.stream)
)
