"""The command `mlx_h2o`: one module of `commands` per subcommand."""

import errno
import importlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence

__all__ = ["main"]

_COMMANDS = {
    "generate": "generate text from a prompt",
    "chat": "talk to a model in the terminal",
    "server": "serve requests over HTTP, in batches",
    "plan": "show how large the cache of a model is, and what fits",
    "cache_prompt": "read a prompt and save its cache",
    "layers": "show which heads retrieve, and the rows of each",
    "evaluate": "measure what smaller caches cost on your texts",
    "benchmark": "measure speed and memory",
}
_OF_OUTPUT = errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT, errno.EAGAIN
"""Errors of standard output, if they name no file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status. Default arguments: those of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return ended(" ".join(["mlx_h2o", *given[:1]]), lambda: _run(given))


def ended(called: str, run: Callable[[], int]) -> int:
    """Run a program and return its exit status; an error is printed in one line."""
    # If standard input is closed, MLX's files could get its number, 0, which MLX reads as failure.
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a locale may lack what a model writes
        sys.stdout.reconfigure(errors="replace")
    known = warnings.formatwarning
    warnings.formatwarning = lambda said, *_, **__: f"{called}: {said}\n"  # not the place in code
    try:
        status = run()
        print(end="", flush=True)  # does nothing if standard output is closed
        return status
    except KeyboardInterrupt:
        print(f"\n{called}: interrupted", file=sys.stderr)
        return 130
    except (OSError, RuntimeError, ValueError) as error:
        known_ones = "No Metal", "there is no memory"  # what layers need, and --preallocate
        if isinstance(error, RuntimeError) and not any(one in str(error) for one in known_ones):
            raise
        if isinstance(error, OSError) and error.errno in _OF_OUTPUT and error.filename is None:
            if not isinstance(error, BrokenPipeError):  # not if the reader is gone
                print(f"{called}: standard output: {error.strerror}", file=sys.stderr)
            # Python flushes standard output once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        from .commands.parsing import told

        print(f"{called}: {told(error)}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = known


def _run(given: Sequence[str]) -> int:
    if not given or given[0] in ("-h", "--help"):
        print(_usage())
        return 0 if given else 2
    if given[0] == "--version":
        from . import __version__, backends
        from .blas import slow_blas
        from .evaluation.environment import environment, environment_line

        advice = [f"{each.name}: {each.advice}" for each in backends().values() if each.advice]
        advice += filter(None, [slow_blas()])
        print(f"mlx_h2o {__version__}", environment_line(environment()), *advice, sep="\n")
        return 0
    command, *rest = given
    if command not in _COMMANDS:
        print(f"mlx_h2o: {command!r} is not a command.\n{_usage()}", file=sys.stderr)
        return 2
    from .commands.options import settings_of
    from .commands.together import together

    module = importlib.import_module(f".commands.{command}", __package__)
    parser = module.parser()
    parser.prog = f"mlx_h2o {command}"
    args = parser.parse_args(rest)
    settings = settings_of(parser, args)
    with together(parser, args) as ranks:
        return int(module.run(args, settings, ranks) or 0)


def _usage() -> str:
    commands = "\n".join(f"  {name:<13} {text}" for name, text in _COMMANDS.items())
    return f"""usage: mlx_h2o COMMAND [options]

The models of mlx_lm, with KV caches of a fixed size.

commands:
{commands}

start with:
  mlx_h2o plan MODEL --memory 24GB            what fits, and the command to run
  mlx_h2o chat --model MODEL --max-kv-bytes 300MB

The flags are those of mlx_lm, and some for the cache: mlx_h2o COMMAND --help."""
