"""Documents read side by side with caches of one kind: the loss of their tokens, facts recalled."""

from __future__ import annotations

import copy
import time
from typing import Any

import mlx.core as mx

import mlx_h2o

__all__ = ["CHUNK", "PROMPT", "losses", "mean_loss", "measure", "read", "recall"]

PROMPT = 32
CHUNK = 128


def read(model: Any, caches: list[Any], tokens: mx.array, chunk: int) -> mx.array:
    """Feed tokens [B, T] in chunks; the last logits [B, V]."""
    logits: mx.array
    for start in range(0, tokens.shape[1], chunk):
        logits = model(tokens[:, start : start + chunk], cache=caches)[:, -1]
        mx.eval(logits, [cache.state for cache in caches])
    return logits


def losses(model: Any, caches: list[Any], tokens: mx.array) -> mx.array:
    """Read all but the last token one by one behind a prompt: losses [B, T - PROMPT], in nats."""
    logits = read(model, caches, tokens[:, :PROMPT], PROMPT)
    found = []
    for index in range(PROMPT, tokens.shape[1]):
        chosen = mx.take_along_axis(logits, tokens[:, index : index + 1], axis=1)[:, 0]
        found.append(mx.logsumexp(logits, axis=1) - chosen)
        if index + 1 < tokens.shape[1]:
            logits = model(tokens[:, index : index + 1], cache=caches)[:, -1]
        mx.eval(found[-1], logits)
    return mx.stack(found, axis=1)


def recall(model: Any, caches: list[Any], last: mx.array, documents: list[Any]) -> list[float]:
    """The share of its facts that greedy decoding answers behind each document.

    ``last`` [B, 1] is the last token of the documents, which the caches have not seen.
    """
    known = mx.zeros(len(documents))
    asked = len(documents[0].planted.questions)
    for fact in range(asked):
        questions = [document.planted.questions[fact] for document in documents]
        again = copy.deepcopy(caches)
        prompts = mx.array([question.prompt for question in questions])
        answers = mx.array([question.answer for question in questions])
        logits = read(model, again, mx.concatenate([last, prompts], axis=1), 1)
        right = mx.ones(len(documents), mx.bool_)
        for place in range(answers.shape[1]):
            right = right & (mx.argmax(logits, axis=1) == answers[:, place])
            logits = read(model, again, answers[:, place : place + 1], 1)
        known = known + right
    return [float(share) for share in (known / asked).tolist()]


def measure(model: Any, make: Any, tokens: mx.array, documents: list[Any]) -> dict[str, Any]:
    """Both readings of all documents with caches of one kind."""
    start = time.perf_counter()
    with mlx_h2o.routing(model):
        caches = make()
        found = losses(model, caches, tokens)
        by_token = recall(model, caches, tokens[:, -1:], documents)
        caches = make()
        read(model, caches, tokens[:, :-1], CHUNK)
        by_chunk = recall(model, caches, tokens[:, -1:], documents)
    return {
        "losses": found,
        "recall_by_token": by_token,
        "recall_by_chunk": by_chunk,
        "seconds": round(time.perf_counter() - start, 1),
    }


def mean_loss(found: mx.array, budget: int) -> list[float]:
    """Of each document, over the tokens predicted after the first eviction at this budget."""
    return [float(loss) for loss in found[:, budget + 1 - PROMPT :].mean(axis=1).tolist()]
