"""A command in several processes of `mlx.launch`: they share one model, and end together."""

from __future__ import annotations

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
"""Flags that mlx_lm does not deal out, or that are about all heads."""
_SILENT = 10
"""Seconds after which a machine that says nothing is asked whether it is there, and again twice."""


@contextmanager
def together(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[Ranks]:
    """The processes of this command. They do the same side by side, and the first one alone speaks.

    Raises ValueError where another process, or its machine, goes away; where nothing here can tell
    of that, a program beside it does, and ends this process.
    """
    # Set in the environment of a process that is one of several.
    if os.environ.keys().isdisjoint(("MLX_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")):
        yield ALONE
        return
    ranks, known = ALONE, _open_files()
    with ExitStack() as stack:
        try:
            ranks = Ranks.of(mx.distributed.init())
            if ranks.size > 1:
                alone = [f"--{name.replace('_', '-')}" for name in _ALONE if vars(args).get(name)]
                if not parser.prog.endswith(("generate", "chat", "server")):  # heads dealt out
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
            ranks.sums(mx.array(0))  # or the others would miss the first that ends
        except RuntimeError as error:
            raise ValueError(f"process {ranks.rank} of {ranks.size}: {error}") from error


def _open_files() -> set[int]:
    return set(map(int, os.listdir("/dev/fd")))


def _connections(files: set[int]) -> list[int]:
    """Those to other processes. They close too where a machine goes without a word."""
    found = []
    idle: int = getattr(socket, "TCP_KEEPIDLE", 0) or getattr(socket, "TCP_KEEPALIVE", 0)
    for file in files:
        # Of a copy, which is closed again: the file is MLX's.
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
    # It gives this process 5 seconds to end, or to fail, once another has gone.
    command = [sys.executable, "-S", "-E", peers.__file__, said, str(os.getpid()), "5"]
    command += map(str, connections)
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=connections):
        yield
