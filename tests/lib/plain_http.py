"""httpx for addresses without TLS, because otherwise every call reads all certificates."""

from functools import partial

import httpx
from httpx import ReadTimeout, Response, TransportError

__all__ = ["ReadTimeout", "Response", "TransportError", "get", "head", "options", "post", "stream"]

get, head, options, post, stream = (partial(getattr(httpx, n), verify=False) for n in __all__[3:])
