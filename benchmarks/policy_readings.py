"""Documents read side by side with caches of one kind: the loss of their tokens, facts recalled."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

import mlx_h2o
from mlx_h2o.evaluation import reading

__all__ = ["CHUNK", "PROMPT", "mean_loss", "measure"]

PROMPT = 32
CHUNK = 128


def measure(model: Any, make: Any, tokens: mx.array, documents: list[Any]) -> dict[str, Any]:
    """Both readings of all documents with caches of one kind."""
    start = time.perf_counter()
    questions = [document.planted.questions for document in documents]

    def recall(caches: list[Any]) -> list[float]:
        right = reading.recall(model, caches, tokens[:, -1:], questions)
        return [sum(of_text) / len(of_text) for of_text in zip(*right, strict=True)]

    with mlx_h2o.routing(model):
        caches = make()
        found = reading.forced(model, caches, tokens, first=PROMPT, chunk=PROMPT).losses
        by_token = recall(caches)
        caches = make()
        reading.read(model, caches, tokens[:, :-1], CHUNK)
        by_chunk = recall(caches)
    return {
        "losses": found,
        "recall_by_token": by_token,
        "recall_by_chunk": by_chunk,
        "seconds": round(time.perf_counter() - start, 1),
    }


def mean_loss(found: mx.array, budget: int) -> list[float]:
    """Of each document, over the tokens predicted after the first eviction at this budget."""
    return [float(loss) for loss in found[:, budget + 1 - PROMPT :].mean(axis=1).tolist()]
