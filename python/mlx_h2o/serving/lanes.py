"""Sequences that take turns: those with drafts, and of models whose caches make no batches."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import (
    GenerationBatch,
    PromptProcessingBatch,
    generate_step,
    speculative_generate_step,
)  # fmt: skip

from ..lm.generate import read
from ..lm.generation_checks import layers_of
from .memory import Limits


@dataclass
class _Lane:
    """A sequence: the parts that it has still to read, and what mlx_lm calls the rest in lists."""

    ahead: list[list[int]]
    max_tokens: int
    caches: list[Any]
    all_tokens: list[int]
    samplers: Any
    logits_processors: list[Any]
    stop_sequences: Any
    steps: Any = None


class Lanes:
    """What is used here of mlx_lm's BatchGenerator, but nothing is computed together: each sequence
    goes on by a chunk of its prompt or by a token.

    Args:
        models: the model, and a draft model if there is one, whose caches are behind the model's.
        limits: tokens of a chunk, and of a draft.
    """

    def __init__(self, models: Sequence[Any], limits: Limits) -> None:
        self._models, self._layers, self._limits = models, [*map(layers_of, models)], limits
        self._lanes: dict[int, _Lane] = {}
        self._next = 0

    def insert_segments(self, segments: list[Any], **given: list[Any]) -> list[int]:
        """One sequence, in lists of one."""
        *parts, last = segments[0]
        ahead = [part for part in (*parts, last[:-1], last[-1:]) if part]
        self._next += 1
        self._lanes[self._next] = _Lane(ahead, **{name: one for name, (one,) in given.items()})
        return [self._next]

    def next(self) -> tuple[list[Any], list[Any]]:
        """Of each sequence, what was read, or a token."""
        lanes = list(self._lanes.items())
        reading = [uid for uid, one in lanes if len(one.ahead) > 1]
        answers = [self._write(uid, one) for uid, one in lanes if uid not in reading]
        return [self._read(uid, self._lanes[uid]) for uid in reading], answers

    def extract_cache(self, uids: Sequence[int]) -> dict[int, Any]:
        lanes = {uid: self._lanes[uid] for uid in uids}
        return {uid: (copy.deepcopy(one.caches), one.all_tokens) for uid, one in lanes.items()}

    def remove(self, uids: Sequence[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        """Without what was drafted and is not answered."""
        gone = {uid: self._lanes.pop(uid) for uid in uids}
        for one in gone.values():
            if one.steps is not None:
                one.steps.close()
        return {uid: (one.caches, one.all_tokens) for uid, one in gone.items()}

    def close(self) -> None:
        for uid in list(self._lanes):
            with contextlib.suppress(Exception):  # of caches that are torn
                self.remove([uid])

    def _read(self, uid: int, one: _Lane) -> Any:
        part, caches = one.ahead[0], iter(one.caches)
        chunk, one.ahead[0] = part[: self._limits.step], part[self._limits.step :]
        for model, count in zip(self._models, self._layers, strict=True):
            own = [next(caches) for _ in range(count)]
            read(model, own, mx.array([chunk]), len(chunk))
        one.all_tokens = one.all_tokens + chunk
        if whole := not one.ahead[0]:
            del one.ahead[0]
        return PromptProcessingBatch.Response(uid, (len(one.all_tokens),) * 2, whole, False)

    def _write(self, uid: int, one: _Lane) -> Any:
        if one.steps is None:
            one.steps, one.stop_sequences = self._begun(one), one.stop_sequences.matcher()
        token, logprobs = next(one.steps)[:2]
        one.all_tokens.append(int(token))
        one.max_tokens -= 1
        reason = "length" if one.max_tokens == 0 else None
        reason = "stop" if one.stop_sequences.advance(int(token)) else reason
        held = (None, None) if reason is None else self.remove([uid])[uid]
        return GenerationBatch.Response(uid, int(token), logprobs, reason, *held)

    def _begun(self, one: _Lane) -> Iterator[Any]:
        before, last = mx.array(one.all_tokens, mx.uint32), one.ahead.pop()
        one.all_tokens = one.all_tokens + last

        def whole(process: Callable[..., mx.array], tokens: mx.array, logits: mx.array) -> mx.array:
            return process(mx.concatenate([before, tokens.astype(mx.uint32)]), logits)

        model, *drafting = self._models
        steps: Callable[..., Iterator[Any]] = generate_step
        if drafting:
            drafts = {"draft_model": drafting[0], "num_draft_tokens": self._limits.drafts}
            steps = partial(speculative_generate_step, **drafts)
        return steps(
            mx.array(last), model, max_tokens=one.max_tokens, sampler=one.samplers,
            logits_processors=[partial(whole, each) for each in one.logits_processors],
            prompt_cache=one.caches,
        )  # fmt: skip
