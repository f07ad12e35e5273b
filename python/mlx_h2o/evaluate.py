"""What an eviction policy costs: perplexity, agreement, recall, bytes.

Functions take (model, cache, tokens): an mlx_lm model, a list of caches, one per layer, and token
ids. The caches may be of any kind: mlx_lm's own (`KVCache`, `RotatingKVCache`) or this package's,
whose attention is routed as needed. A comparison is fair when every arm gets the same tokens in the
same chunks: use one `chunk` for all.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from .evaluation import reading

__all__ = [
    "Fact",
    "Peak",
    "TeacherForced",
    "evicted_rows",
    "kv_bytes",
    "peak_memory",
    "perplexity",
    "prefill",
    "recall",
    "teacher_forced",
    "top1_agreement",
]

Progress = reading.Progress


class Fact(Protocol):
    """A cue, and the tokens that must follow it."""

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def answer(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class TeacherForced:
    """One pass over a text, token by token.

    first: the index of the first token that was predicted.
    losses: the negative log-likelihood of each token from `first` on, in nats.
    top1: the token that the model held most likely at each of these places.
    """

    first: int
    losses: tuple[float, ...]
    top1: tuple[int, ...]


@dataclass
class Peak:
    """Filled when `peak_memory` ends: the highest number of bytes that MLX held at once."""

    bytes: int = 0


def prefill(
    model: Any,
    cache: list[Any],
    tokens: Sequence[int],
    *,
    chunk: int = 128,
    progress: Progress | None = None,
) -> mx.array:
    """Run `tokens` through the model in chunks, filling `cache`; returns the last logits [V].

    Raises ValueError if there is no token, or if `chunk` is below 1.
    """
    if not tokens:
        raise ValueError("[prefill] no tokens, expected at least one.")
    if chunk < 1:
        raise ValueError(f"[prefill] chunk is {chunk}, expected at least 1.")
    with _routed(model, cache):
        return reading.read(model, cache, mx.array([list(tokens)]), chunk, progress)[0]


def teacher_forced(
    model: Any,
    cache: list[Any],
    tokens: Sequence[int],
    *,
    first: int,
    chunk: int = 128,
    progress: Progress | None = None,
) -> TeacherForced:
    """Feed the first `first` tokens in chunks, the rest one by one, each predicted beforehand.

    With `first` at the budget of the cache, every prediction but the first is made after a row was
    evicted.

    Raises ValueError unless 1 <= first < len(tokens).
    """
    if not 1 <= first < len(tokens):
        raise ValueError(
            f"[teacher_forced] first is {first}, expected 1 <= first < {len(tokens)} tokens."
        )
    with _routed(model, cache):
        found = reading.forced(
            model, cache, mx.array([list(tokens)]), first=first, chunk=chunk, progress=progress
        )
    losses: Any = found.losses[0].tolist()
    top1: Any = found.top1[0].tolist()
    return TeacherForced(first=first, losses=tuple(losses), top1=tuple(top1))


def perplexity(run: TeacherForced) -> float:
    """exp of the mean loss."""
    return math.exp(sum(run.losses) / len(run.losses))


def top1_agreement(run: TeacherForced, full: TeacherForced) -> float:
    """The share of places where two runs over the same text hold the same token most likely.

    Raises ValueError if the runs are not over the same places.
    """
    if (run.first, len(run.top1)) != (full.first, len(full.top1)):
        raise ValueError(
            f"[top1_agreement] {len(run.top1)} places from {run.first} on, "
            f"expected {len(full.top1)} from {full.first} on, as in the other run."
        )
    return sum(a == b for a, b in zip(run.top1, full.top1, strict=True)) / len(full.top1)


def recall(model: Any, cache: list[Any], facts: Sequence[Fact]) -> tuple[bool, ...]:
    """Ask each fact behind what `cache` holds: whether greedy decoding gives the whole answer.

    Every fact is asked on a copy of its own: `cache` loses no more than the surplus of a chunk, and
    no question sees another.
    """
    return tuple(_answers(model, copy.deepcopy(cache), fact) for fact in facts)


def kv_bytes(cache: Sequence[Any]) -> int:
    """The bytes that the caches of all layers hold, allocated slack and bookkeeping included."""
    return sum(int(layer.nbytes) for layer in cache)


def evicted_rows(cache: Sequence[Any]) -> int:
    """Rows seen but no longer held, summed over layers (each KV head of a layer holds as many)."""
    return sum(int(layer.offset) - int(layer.size()) for layer in cache)


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure the highest number of bytes that MLX holds inside the `with` block.

    Everything that is alive counts: the model's weights, and caches of other arms still held.
    """
    peak = Peak()
    mx.clear_cache()
    mx.reset_peak_memory()
    yield peak
    peak.bytes = int(mx.get_peak_memory())


def _answers(model: Any, cache: list[Any], fact: Fact) -> bool:
    with _routed(model, cache):
        logits = prefill(model, cache, fact.prompt, chunk=1)
        for expected in fact.answer:
            if mx.argmax(logits).item() != expected:
                return False
            logits = model(mx.array([[expected]]), cache=cache)[0, -1]
    return True


def _routed(model: Any, cache: Sequence[Any]) -> AbstractContextManager[Any]:
    """Our attention, for caches that need it; mlx_lm untouched for the rest."""
    from mlx_h2o.lm.prompt_cache import evicting_caches
    from mlx_h2o.lm.routing import routing_for

    ours = list(evicting_caches(cache))
    return routing_for(model, ours) if ours else nullcontext()
