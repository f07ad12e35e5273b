"""Texts read side by side through one list of caches: losses, agreement, answers.

Every sequence of a batch has its own rows in every cache, mlx_lm's and ours, so that the figures
are those of the texts read alone (a test compares them). A comparison is fair when every arm gets
the same tokens in the same chunks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..errors import check_int
from ..lm.checks import checked_tokens

__all__ = [
    "Fact",
    "Forced",
    "Peak",
    "Progress",
    "TeacherForced",
    "answers",
    "evicted_rows",
    "forced",
    "kv_bytes",
    "peak_memory",
    "perplexity",
    "prefill",
    "read",
    "recall",
    "routed",
    "teacher_forced",
    "top1_agreement",
]

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""


class Fact(Protocol):
    """A cue, and the tokens that must follow it."""

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def answer(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Forced:
    """Texts of which every token was predicted before it was read.

    losses: [B, N] negative log-likelihoods of the tokens, in nats.
    top1: int [B, N], the tokens held most likely.
    log_weights: float16 [B, N, V], logits less the greatest; None where they were not asked for.
    divergences: [B, N], Kullback-Leibler divergence of the next token from the reference's, in
        nats; None without a reference.
    """

    losses: mx.array
    top1: mx.array
    log_weights: mx.array | None = None
    divergences: mx.array | None = None


@dataclass(frozen=True)
class TeacherForced:
    """One text, of which every token from some place on was predicted before it was read.

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


def routed(model: Any, caches: Sequence[Any]) -> AbstractContextManager[Any]:
    """Our attention, for caches that need it; mlx_lm untouched for the rest."""
    from mlx_h2o.lm.prompt_cache import evicting_caches
    from mlx_h2o.lm.routing import routing_for

    ours = list(evicting_caches(caches))
    return routing_for(model, ours) if ours else nullcontext()


def read(
    model: Any,
    caches: list[Any],
    tokens: mx.array,
    chunk: int,
    progress: Progress | None = None,
) -> mx.array:
    """Feed tokens [B, T] in chunks; the last logits [B, V], which are computed when they are needed.

    The caller routes the model.
    """
    logits: mx.array
    total = tokens.shape[1]
    for start in range(0, total, chunk):
        logits = model(tokens[:, start : start + chunk], cache=caches)[:, -1]
        mx.eval([cache.state for cache in caches])
        if progress is not None:
            progress(min(start + chunk, total), total)
    return logits


def forced(
    model: Any,
    caches: list[Any],
    tokens: mx.array,
    *,
    first: int,
    step: int = 1,
    chunk: int | None = None,
    keep: bool = False,
    reference: Forced | None = None,
    progress: Progress | None = None,
) -> Forced:
    """Read the first `first` of tokens [B, T], then the rest `step` at a time, predicting each.

    With a step of 1 every prediction is made with what the caches hold; in a longer step tokens
    also see those of the step before them. The caller routes the model.

    Args:
        chunk: tokens of the beginning that are read at once; None: all.
        keep: keep `log_weights`, to be the reference of other runs.
        reference: a run over the same places that kept them.
    """
    ahead = read(model, caches, tokens[:, :first], chunk or first)[:, None]
    found: list[tuple[mx.array, ...]] = []
    total = tokens.shape[1]
    for start in range(first, total, step):
        end = min(start + step, total)
        fed = tokens[:, start : end - (end == total)]
        logits = model(fed, cache=caches) if fed.shape[1] else ahead[:, :0]
        inside = logits[:, : end - start - 1]
        predicted = mx.concatenate([ahead, inside], axis=1) if inside.shape[1] else ahead
        ahead = logits[:, -1:]
        theirs = None
        if reference is not None and reference.log_weights is not None:
            theirs = reference.log_weights[:, start - first : end - first]
        found.append(_judged(predicted, tokens[:, start:end], keep, theirs))
        mx.eval(found[-1], ahead)
        if progress is not None:
            progress(end - first, total - first)
    losses, top1, *more = (
        mx.concatenate(list(parts), axis=1) for parts in zip(*found, strict=True)
    )
    return Forced(
        losses,
        top1,
        log_weights=more[0] if keep else None,
        divergences=more[-1] if len(more) > keep else None,
    )


def _judged(
    logits: mx.array, tokens: mx.array, keep: bool, theirs: mx.array | None
) -> tuple[mx.array, ...]:
    """Losses and best tokens [B, L] of logits [B, L, V], and what else was asked for."""
    logits = logits.astype(mx.float32)
    lse = mx.logsumexp(logits, axis=-1)
    chosen = mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    found = [lse - chosen, mx.argmax(logits, axis=-1)]
    if keep:
        found.append((logits - logits.max(axis=-1, keepdims=True)).astype(mx.float16))
    if theirs is not None:
        reference = theirs.astype(mx.float32)
        reference = reference - mx.logsumexp(reference, axis=-1, keepdims=True)
        apart = mx.exp(reference) * (reference - (logits - lse[..., None]))
        found.append(mx.where(mx.isinf(reference), 0, apart).sum(axis=-1))
    return tuple(found)


def answers(
    model: Any, caches: list[Any], prompts: mx.array, wanted: mx.array, chunk: int = 512
) -> mx.array:
    """Ask behind what the caches hold: which tokens of the answers are the model's first choice.

    The question is read in chunks, the right answer token by token, so that one wrong token does
    not count for those behind it. The caches stay as they are. The caller routes the model.

    Args:
        prompts: int [B, P], the questions.
        wanted: int [B, A], their answers.

    Returns:
        bool [B, A].
    """
    again = copy.deepcopy(caches)
    logits = read(model, again, prompts, chunk)
    right = []
    for place in range(wanted.shape[1]):
        right.append(mx.argmax(logits, axis=-1) == wanted[:, place])
        if place + 1 < wanted.shape[1]:
            logits = read(model, again, wanted[:, place : place + 1], 1)
    return mx.stack(right, axis=1)


def prefill(
    model: Any,
    cache: list[Any],
    tokens: Sequence[int],
    *,
    chunk: int = 128,
    progress: Progress | None = None,
) -> mx.array:
    """Run `tokens` through the model in chunks, filling `cache`; returns the last logits [V].

    Raises ValueError if there is no token, or one that the model does not know, or if `chunk` is
    below 1.
    """
    text = mx.array([checked_tokens("prefill", "tokens", tokens, [model])])
    check_int("prefill", "chunk", chunk)
    with routed(model, cache):
        return read(model, cache, text, chunk, progress)[0]


def teacher_forced(
    model: Any,
    cache: list[Any],
    tokens: Sequence[int],
    *,
    first: int,
    step: int = 1,
    chunk: int = 128,
    progress: Progress | None = None,
) -> TeacherForced:
    """Feed the first `first` tokens in chunks, the rest `step` at a time; predict each before it.

    With `first` at the budget of the cache and a `step` of 1, every prediction but the first is
    made after a row was evicted.

    Raises ValueError unless 1 <= first < len(tokens), or if the model does not know a token, or
    `chunk` is below 1.
    """
    text = mx.array([checked_tokens("teacher_forced", "tokens", tokens, [model])])
    check_int("teacher_forced", "chunk", chunk)
    if not 1 <= first < len(tokens):
        raise ValueError(
            f"[teacher_forced] first is {first}, expected 1 <= first < {len(tokens)} tokens."
        )
    with routed(model, cache):
        found = forced(model, cache, text, first=first, step=step, chunk=chunk, progress=progress)
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

    Every fact is asked on a copy of its own: no question sees another.

    Raises ValueError where the model does not know a token.
    """

    def tokens(name: str, given: Sequence[int]) -> mx.array:
        return mx.array([checked_tokens("recall", name, given, [model])])

    texts = [(tokens("a prompt", fact.prompt), tokens("an answer", fact.answer)) for fact in facts]
    with routed(model, cache):
        asked = (answers(model, cache, prompt, answer, 1) for prompt, answer in texts)
        return tuple(bool(right.all().item()) for right in asked)


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
