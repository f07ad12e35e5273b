"""Requests beside the batch: those with drafts, and of models whose caches make no batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step

from .request import Limits, Request

__all__ = ["Lane"]


class Lane:
    """A request with its caches, which goes on by a chunk of its prompt or by a token.

    Args:
        request: the request, its places known.
        models: the model, and a draft model if there is one.
        layers: how many caches each has.
        caches: of all of them, one behind the other, which have seen ``read`` tokens.
        limits: tokens of a chunk, and of a draft.
        spared: tokens that xtc never takes away.
    """

    def __init__(
        self, request: Request, models: Sequence[Any], layers: Sequence[int], caches: list[Any],
        read: int, limits: Limits, spared: list[int],
    ) -> None:  # fmt: skip
        self.request, self.caches, self.read = request, caches, read
        self._models, self._layers, self._limits = models, layers, limits
        self._spared = spared
        self._steps: Any = None

    @property
    def is_read(self) -> bool:
        """Whether all of the prompt is, but for its last token."""
        return self.read >= len(self.request.tokens) - 1

    def read_on(self) -> list[Any] | None:
        """Read a chunk; copies of the caches where a place is reached at which to keep them."""
        tokens, ahead = self.request.tokens, self.request._places
        place = ahead[0] if ahead else len(tokens) - 1
        end = min(place, self.read + self._limits.step)
        chunk, caches = mx.array(tokens[self.read : end])[None], iter(self.caches)
        for model, count in zip(self._models, self._layers, strict=True):
            own = [next(caches) for _ in range(count)]
            model(chunk, cache=own)
            mx.eval([one.state for one in own])
        self.read = end
        if end != place or not ahead:
            return None
        self.request._places = ahead[1:]
        return copy.deepcopy(self.caches)

    def next(self) -> tuple[int, mx.array]:
        """A token and the log probabilities [V] in its place."""
        if self._steps is None:
            self._steps = self._begin()
        token, logprobs = next(self._steps)[:2]
        return int(token), logprobs

    def close(self) -> None:
        """Take back what was drafted and is not answered."""
        if self._steps is not None:
            self._steps.close()

    def _begin(self) -> Iterator[Any]:
        request, (model, *drafting) = self.request, self._models
        before = mx.array(request.tokens[:-1], mx.uint32)

        def whole(process: Any, tokens: mx.array, logits: mx.array) -> mx.array:
            found: mx.array = process(mx.concatenate([before, tokens.astype(mx.uint32)]), logits)
            return found

        given: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "sampler": request.sampler(self._spared),
            "logits_processors": [partial(whole, one) for one in request.processors()],
            "prompt_cache": self.caches,
        }
        steps: Any = generate_step
        if drafting:
            steps = partial(speculative_generate_step, draft_model=drafting[0])
            given["num_draft_tokens"] = self._limits.drafts
        found: Iterator[Any] = steps(mx.array(request.tokens[-1:]), model, **given)
        return found
