"""Listen on a port, and serve until a signal comes."""

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import Any

import uvicorn

from .engine import Engine

_LOG = logging.getLogger("mlx_h2o")
_BACKLOG = 1024  # connections that the system may hold before they are accepted
_TURN = 0.0005  # seconds that the engine may keep Python's lock while its tokens wait to be sent


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:  # its text repeats the address
        said = f"{str(error.strerror).partition(' (')[0]}: --host {host} --port {port}"
        raise OSError(error.errno, said) from error


def serve(app: Any, engine: Engine, listener: socket.socket, grace: float) -> None:
    """Serve until SIGTERM or Ctrl-C; running answers then have ``grace`` seconds."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, backlog=1, server_header=False,
        timeout_graceful_shutdown=int(grace) + 15, timeout_keep_alive=75,
    )  # fmt: skip
    sys.setswitchinterval(_TURN)
    server = _Server(config, engine, grace)
    for one in (signal.SIGINT, signal.SIGTERM):  # also those that come before it is up
        signal.signal(one, server.handle_exit)
    server.run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float) -> None:
        super().__init__(config)
        self._engine, self._grace, self._down = engine, grace, False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio tries ``backlog`` accepts at once, and logs each without free files: it gets 1.
        for one in sockets or []:
            one.listen(_BACKLOG)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # more hides who reads not

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._engine.ended.is_set()

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit and sig == signal.SIGINT and not self._down:  # a second Ctrl-C
            os._exit(130)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        waiting = self._engine.running + self._engine.waiting
        _LOG.info("ending: %d answers have %g seconds", waiting, self._grace)
        loop = asyncio.get_running_loop()
        last = loop.time() + self._grace

        def hang_up() -> None:
            for one in self.server_state.connections:
                one.transport.abort()

        closing = loop.run_in_executor(None, self._engine.close, self._grace)
        # A client that stops reading, or sent half a request, must not delay the shutdown.
        closing.add_done_callback(lambda _: loop.call_at(max(last, loop.time()) + 1, hang_up))
        await super().shutdown(sockets)
        whole, self._down = await closing, True  # uvicorn raises its signals again
        _LOG.info("ended: %s", "every answer was finished" if whole else "answers were lost")
