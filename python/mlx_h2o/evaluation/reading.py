"""Read texts side by side through one list of caches: losses, agreement, answers.

Every sequence of a batch has its own rows in every cache, mlx_lm's and ours, so that the figures
equal those of texts read alone (a test compares them). A comparison is fair if every arm gets the
same tokens in the same chunks.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.activations import log_softmax
from mlx.nn.losses import cross_entropy

from ..lm.generate import read

CHUNK = 512
"""Tokens that are read at once if texts are read in chunks."""

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""


@dataclass(frozen=True)
class Forced:
    """Results for texts whose every token was predicted before it was read."""

    losses: mx.array  # [B, N] negative log-likelihoods of the tokens, in nats
    top1: mx.array  # int [B, N], the most likely tokens
    log_weights: mx.array | None = None  # float16 [B, N, V], logits minus their maximum, if kept
    # [B, N], Kullback-Leibler divergence of the prediction from the reference's, if there is one.
    divergences: mx.array | None = None


def forced(
    model: Any,
    caches: list[Any],
    tokens: mx.array,
    *,
    first: int,
    step: int = 1,
    keep: bool = False,
    reference: Forced | None = None,
    progress: Progress = lambda done, total: None,
) -> Forced:
    """Read the first `first` of tokens [B, T] in chunks, then the rest `step` at a time, predicting
    each.

    With a step of 1, every prediction uses only what the caches hold; in a longer step, tokens also
    see earlier tokens of the same step. The caller must route the model.

    Args:
        keep: keep `log_weights`, to be the reference of other runs.
        reference: a run over the same tokens that kept them.
    """
    ahead = read(model, caches, tokens[:, :first], CHUNK)[:, None]
    found: list[dict[str, mx.array]] = []
    total = tokens.shape[1]
    for start in range(first, total, step):
        end, predicted, theirs = min(start + step, total), ahead, None
        fed = tokens[:, start : min(end, total - 1)]  # the last token is only predicted
        if fed.shape[1]:
            logits = model(fed, cache=caches)
            predicted = mx.concatenate([ahead, logits[:, : end - start - 1]], axis=1)
            ahead = logits[:, -1:]
        if reference is not None:
            theirs = cast(mx.array, reference.log_weights)[:, start - first : end - first]
        found.append(_judged(predicted, tokens[:, start:end], keep, theirs))
        mx.eval(found[-1], ahead)
        progress(end - first, total - first)
    whole = {name: mx.concatenate([one[name] for one in found], axis=1) for name in found[0]}
    return Forced(**whole)


def _judged(
    logits: mx.array, tokens: mx.array, keep: bool, theirs: mx.array | None
) -> dict[str, mx.array]:
    """The fields of Forced for tokens [B, L] and their logits [B, L, V]."""
    logits = logits.astype(mx.float32)
    found = {"losses": cross_entropy(logits, tokens), "top1": mx.argmax(logits, axis=-1)}
    if keep:
        found["log_weights"] = (logits - logits.max(axis=-1, keepdims=True)).astype(mx.float16)
    if theirs is not None:
        ours, theirs = (log_softmax(one.astype(mx.float32)) for one in (logits, theirs))
        apart = mx.exp(theirs) * (theirs - ours)
        found["divergences"] = mx.where(mx.isinf(theirs), 0, apart).sum(axis=-1)
    return found


def answers(model: Any, caches: list[Any], prompts: mx.array, wanted: mx.array) -> mx.array:
    """Ask questions after what the caches hold: which answer tokens are the model's first choice?

    The question is read in chunks, and the right answer token by token, so that one wrong token
    does not spoil those after it. The caches are not changed. The caller must route the model.

    Args:
        prompts: int [B, P], the questions.
        wanted: int [B, A], their answers.

    Returns:
        bool [B, A].
    """
    again = copy.deepcopy(caches)
    logits = read(model, again, prompts, CHUNK)
    right = []
    for place in range(wanted.shape[1]):
        right.append(mx.argmax(logits, axis=-1) == wanted[:, place])
        if place + 1 < wanted.shape[1]:
            logits = read(model, again, wanted[:, place : place + 1], 1)
    return mx.stack(right, axis=1)
