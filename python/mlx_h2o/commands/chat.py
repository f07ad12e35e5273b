"""`mlx_h2o chat`: talk to a model in the terminal, in a fixed amount of memory."""

import argparse
import copy
import importlib
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import mlx.core as mx
from mlx_lm.generate import DEFAULT_MODEL

from ..lm.generate import stream_generate
from ..lm.prompt_cache import rows_held
from ..lm.ranks import Ranks, ranks_of
from . import options
from .flags import cache_parser
from .parsing import OneLineParser
from .watch import Watch

HELP = "q: quit   r: reset   h: help   Ctrl-C: end an answer"


def parser() -> OneLineParser:
    names = "model adapter-path trust-remote-code pipeline prefill-step-size system-prompt"
    answers = "max-tokens temp top-p xtc-probability xtc-threshold seed"
    return cache_parser(
        "Talk to a model, with KV caches of a fixed size.",
        "model system-prompt max-tokens max-kv-bytes max-kv-size", {"": names, "answers": answers},
        model=DEFAULT_MODEL, max_tokens=256, seed=0,
    )  # fmt: skip


def run(args: argparse.Namespace, settings: options.CacheSettings, ranks: Ranks) -> None:
    """Talk until the input ends."""
    options.read_whole_characters("replace")
    with suppress(ImportError):  # makes the input line editable
        importlib.import_module("readline")
    mx.random.seed(args.seed)
    model, tokenizer = options.loaded(args, ranks)
    if not tokenizer.has_chat_template:
        raise ValueError(f"{args.model} has no chat template, expected one: try mlx_h2o generate")
    settings = settings.fitted(model)
    chooses = options.sampler(args, model, tokenizer)
    length = "any length" if args.max_tokens < 0 else f"at most {args.max_tokens} tokens"
    print(f"{args.model}, answers of {length}; {settings}.\n{HELP}")
    caches, beyond = settings.caches(model), False
    while (said := _asked()) != "q":
        if said == "r":
            caches = settings.caches(model)
            print("A new conversation begins.")
        elif said in ("h", ""):
            print(HELP)
        else:
            tokens = options.templated(tokenizer, args.system_prompt, said)
            given = {"max_tokens": args.max_tokens, "prefill_step_size": args.prefill_step_size}
            caches = _answered(model, tokenizer, tokens, caches, sampler=chooses, **given)
            beyond = beyond or options.say_where_beyond(model, caches)
    options.say_summary(caches, model)


def _asked() -> str:
    """The next line of input; the end of the input ends the chat."""
    try:
        return input(">> " if sys.stdin.isatty() else "")
    except EOFError:
        print()
        return "q"


class _EndedError(Exception):
    """Ctrl-C ended an answer while its question was read."""


def _answered(
    model: Any, tokenizer: Any, tokens: Sequence[int], caches: list[Any], **given: Any
) -> list[Any]:
    """Print an answer, which Ctrl-C cuts short; returns caches that hold the conversation.

    They hold a cut answer as far as it was printed, and nothing of a question that was not read to
    its end.
    """
    before = copy.deepcopy(caches) if len(tokens) > given["prefill_step_size"] else None
    last = None
    # Ctrl-C reaches several processes at different tokens, so there it ends them.
    with Watch() as watch, _ctrl_c(ranks_of(model).size == 1) as pressed:

        def reading(done: int, total: int) -> None:
            watch("reading", done, total)
            if pressed and before is not None and 0 < done < total:
                raise _EndedError

        given["prompt_progress_callback"] = reading
        answer: Any = stream_generate(model, tokenizer, tokens, prompt_cache=caches, **given)
        try:
            for last in answer:
                print(last.text, end="", flush=True)
                if pressed:
                    break
        except _EndedError:
            print("(The question was not read.)")
            return before or caches
        finally:
            answer.close()
    print(" ..." if pressed else "")
    if last is not None:
        rows, evicted = rows_held(caches)
        print(
            f"{last.generation_tokens} tokens · {last.generation_tps:.1f} tok/s · prompt "
            f"{last.prompt_tps:.1f} tok/s · {rows} rows, {evicted} evicted · peak "
            f"{last.peak_memory:.2f} GB"
        )
    return caches


@contextmanager
def _ctrl_c(notes: bool) -> Iterator[list[int]]:
    """Within the context, the first Ctrl-C is only noted if ``notes``, and the second interrupts:
    in the middle of a step it would leave some layers with a token more than others."""
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed or not notes:
            raise KeyboardInterrupt
        pressed.append(number)

    known = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, known)
