"""A command in several processes of `mlx.launch`: they share one model, and end together."""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress

import mlx.core as mx

from ..lm.ranks import ALONE, Ranks
from . import peers

_ALONE = ("adapter_path", "cache_dir", "draft_model", "prompt_cache_file", "quantize_activations")
"""Flags that need a whole model: mlx_lm does not split it with them, or they concern all heads."""
_SILENT = 10
"""Seconds of silence before TCP probes whether a machine is alive, and between two probes."""


@contextmanager
def together(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[Ranks]:
    """The processes of this command. They run it side by side, and only the first one prints.

    Raises ValueError if another process, or its machine, goes away; if this process cannot notice,
    because it waits in MLX, a program beside it (:mod:`.peers`) ends it.
    """
    # One of these is set in the environment of each of several processes.
    if os.environ.keys().isdisjoint(("MLX_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")):
        yield ALONE
        return
    ranks, known = ALONE, _open_files()
    with ExitStack() as stack:
        try:
            ranks = Ranks.of(mx.distributed.init())
            if ranks.size > 1:
                alone = [f"--{name.replace('_', '-')}" for name in _ALONE if vars(args).get(name)]
                if not parser.prog.endswith(("generate", "chat", "server")):  # split models
                    alone = [parser.prog]
                for name in alone:
                    parser.error(f"{name} is for one process, found {ranks.size}")
                said = f"{parser.prog}: process {ranks.rank} of {ranks.size}: another one has gone"
                stack.enter_context(_watched(_connections(_open_files() - known), said))
                mx.random.seed(ranks.told(int.from_bytes(os.urandom(8), "big")))
            nowhere = stack.enter_context(open(os.devnull, "w"))
            out, err = (nowhere, nowhere) if ranks.rank else (sys.stdout, sys.stderr)
            with redirect_stdout(out), redirect_stderr(err):
                yield ranks
            ranks.gathered(0)  # or the first to end would look lost to the others
        except RuntimeError as error:
            raise ValueError(f"process {ranks.rank} of {ranks.size}: {error}") from error


def _open_files() -> set[int]:
    return set(map(int, os.listdir("/dev/fd")))


def _connections(files: set[int]) -> list[int]:
    """The connections to other processes, which now also close if a machine dies silently."""
    found = []
    idle: int = getattr(socket, "TCP_KEEPIDLE", 0) or getattr(socket, "TCP_KEEPALIVE", 0)
    for file in files:
        # On a duplicate, which is closed again, since the file belongs to MLX.
        with suppress(OSError), socket.socket(fileno=os.dup(file)) as one:
            one.getpeername()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in ((idle, _SILENT), (socket.TCP_KEEPINTVL, _SILENT)):
                one.setsockopt(socket.IPPROTO_TCP, name, value)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
            found.append(file)
    return found


@contextmanager
def _watched(connections: list[int], said: str) -> Iterator[None]:
    # Once another process is gone, this one has 5 seconds to end or fail by itself.
    command = [sys.executable, "-S", "-E", peers.__file__, said, str(os.getpid()), "5"]
    command += map(str, connections)
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=connections):
        yield
