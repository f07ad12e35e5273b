"""Texts read side by side through one list of caches: losses, agreement, facts recalled.

Every sequence of a batch has its own rows in every cache, mlx_lm's and ours, so that the figures
are those of the texts read alone (a test compares them). Whoever calls this routes the model where
the caches need it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .facts import Question

__all__ = ["Forced", "forced", "read", "recall"]

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""


@dataclass(frozen=True)
class Forced:
    """Texts read token by token.

    losses: [B, N] negative log-likelihoods of the tokens, in nats.
    top1: int [B, N], the tokens held most likely.
    log_weights: float16 [B, N, V], logits less the greatest; None where they were not asked for.
    divergences: [B, N], Kullback-Leibler divergence of this model's next token from the
        reference's, in nats; None without a reference.
    """

    losses: mx.array
    top1: mx.array
    log_weights: mx.array | None = None
    divergences: mx.array | None = None


def read(
    model: Any,
    caches: list[Any],
    tokens: mx.array,
    chunk: int,
    progress: Progress | None = None,
) -> mx.array:
    """Feed tokens [B, T] in chunks; the last logits [B, V]."""
    logits: mx.array
    total = tokens.shape[1]
    for start in range(0, total, chunk):
        logits = model(tokens[:, start : start + chunk], cache=caches)[:, -1]
        mx.eval(logits, [cache.state for cache in caches])
        if progress is not None:
            progress(min(start + chunk, total), total)
    return logits


def forced(
    model: Any,
    caches: list[Any],
    tokens: mx.array,
    *,
    first: int,
    chunk: int,
    keep: bool = False,
    reference: Forced | None = None,
    progress: Progress | None = None,
) -> Forced:
    """Read `first` tokens of tokens [B, T] in chunks, the rest one by one, each predicted before.

    Args:
        keep: keep `log_weights`, to be the reference of other runs.
        reference: a run over the same places that kept them.
    """
    logits = read(model, caches, tokens[:, :first], chunk)
    steps: list[tuple[mx.array, ...]] = []
    total = tokens.shape[1]
    for index in range(first, total):
        logits = logits.astype(mx.float32)
        chosen = mx.take_along_axis(logits, tokens[:, index : index + 1], axis=1)[:, 0]
        lse = mx.logsumexp(logits, axis=1)
        step = [lse - chosen, mx.argmax(logits, axis=1)]
        if keep:
            step.append((logits - logits.max(axis=1, keepdims=True)).astype(mx.float16))
        if reference is not None and reference.log_weights is not None:
            theirs = reference.log_weights[:, index - first].astype(mx.float32)
            theirs = theirs - mx.logsumexp(theirs, axis=1, keepdims=True)
            difference = theirs - (logits - lse[:, None])
            step.append(mx.where(mx.isinf(theirs), 0, mx.exp(theirs) * difference).sum(axis=1))
        if index + 1 < total:
            logits = model(tokens[:, index : index + 1], cache=caches)[:, -1]
        mx.eval(step, logits)
        steps.append(tuple(step))
        if progress is not None:
            progress(index + 1 - first, total - first)
    losses, top1, *more = (mx.stack(list(column), axis=1) for column in zip(*steps, strict=True))
    return Forced(
        losses,
        top1,
        log_weights=more[0] if keep else None,
        divergences=more[-1] if len(more) > keep else None,
    )


def recall(
    model: Any, caches: list[Any], last: mx.array, questions: Sequence[Sequence[Question]]
) -> list[list[bool]]:
    """Ask behind what the caches hold: whether greedy decoding gives the whole answer.

    Every question is asked on a copy of its own. Questions at the same place of different texts
    have as many tokens each.

    Args:
        last: [B, 1], the last tokens of the texts, which the caches have not seen.
        questions: for each text, its questions.

    Returns:
        For each question, whether each text's answer was right.
    """
    found = []
    for asked in zip(*questions, strict=True):
        again = copy.deepcopy(caches)
        prompts = mx.array([question.prompt for question in asked])
        answers = mx.array([question.answer for question in asked])
        logits = read(model, again, mx.concatenate([last, prompts], axis=1), 1)
        right = mx.ones(len(asked), mx.bool_)
        for place in range(answers.shape[1]):
            right = right & (mx.argmax(logits, axis=1) == answers[:, place])
            logits = read(model, again, answers[:, place : place + 1], 1)
        answered: Any = right.tolist()
        found.append([bool(one) for one in answered])
    return found
