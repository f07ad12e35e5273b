"""One answer that is asked for, and what comes of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors

from .grammar import constrain
from .sampling import Sampling
from .text import TokenLogprob, Writer, logprobs_of


class BusyError(Exception):
    """The queue is full, or the engine is about to end."""


@dataclass(frozen=True)
class Event:
    """What a token brings to a request: segments of text (kind, text), and logprobs if they were
    asked for; at the end finish, "stop" or "length", or error. cut: it ends in the middle, and not
    where the model ends it."""

    segments: list[tuple[str, str]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    error: Exception | None = None
    cut: bool = False


@dataclass(eq=False)
class Request:
    """One answer that is asked for, and what the engine knows of it."""

    tokens: list[int]  # of the prompt
    sink: Callable[[Event], None]  # is told of each, in the engine's thread; it must not wait
    max_tokens: int = 512  # of the answer
    sampling: Sampling = field(default_factory=Sampling)  # how its tokens are chosen
    penalties: dict[str, Any] = field(default_factory=dict)  # of mlx_lm's make_logits_processors
    stops: Sequence[str] = ()  # texts that end it
    top_logprobs: int | None = None  # likeliest tokens to tell of with each; None: no logprobs
    state: str = "normal"  # the kind of text with which the answer begins
    goes_on: bool = False  # whether the answer goes on with the text of the prompt
    grammar: Any = None  # a matcher of which a copy limits the answer; None: nothing does

    left: bool = False  # set by whoever asked, once nobody waits for the answer any more
    number: int = 0  # set by the engine: how many were submitted before it
    cached: int | None = None  # tokens of the prompt that were not read again, once that is known
    answer: list[int] = field(default_factory=list)
    failure: Exception | None = None
    _suspect: bool = False  # it was running when a step failed, and has had no token since
    _ended: bool = False  # it has heard its last, or nobody hears it
    _nbytes: int = 0
    _failures: int = 0
    _writer: Writer | None = None
    _places: list[int] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """For other ranks, which need not know who asked, nor how the first one chooses tokens."""
        without: dict[str, Any] = {"grammar": None, "penalties": {}, "top_logprobs": None}
        return self.__dict__ | without | {"sink": bool}  # which hears it and does nothing

    @property
    def seen(self) -> list[int]:
        """The prompt and what was answered."""
        return self.tokens + self.answer

    @cached_property
    def prompt(self) -> Any:
        """The tokens of the prompt as an array, for who looks at them at every step."""
        return np.array(self.tokens)

    def sampler(self, spared: list[int]) -> Callable[[mx.array], mx.array]:
        """What chooses its tokens, of which xtc never takes ``spared`` away; a failure is noted,
        and ends this request alone."""
        sample = self.sampling.sampler(itertools.count(len(self.answer)), spared)
        if sample is greedy_sampler:  # one call for all rows of a batch
            return sample
        return self._guarded(sample, lambda logprobs: mx.zeros(logprobs.shape[:1], mx.uint32))

    def processors(self) -> list[Callable[[mx.array, mx.array], mx.array]]:
        """What changes its logits, guarded likewise."""
        made = make_logits_processors(**self.penalties) if self.penalties else []
        if self.grammar is not None:
            made.append(constrain(self.grammar.deep_copy(), len(self.tokens)))
        return [self._guarded(one, lambda tokens, logits: logits) for one in made]

    def _guarded(self, run: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*given: mx.array) -> Any:
            try:
                return run(*given)
            except Exception as error:
                self.failure = error
                return instead(*given)

        return guarded

    def take(self, tokenizer: Any, token: int, logprobs: mx.array, reason: str | None) -> Event:
        """What a token of the answer brings; with ``reason`` the model makes no more.

        Args:
            logprobs: [V], of all tokens in its place.
            reason: "stop": it is a token that ends answers, and has no text; or "length".
        """
        self.answer.append(token)
        self._suspect = False
        writer = self._writer or Writer(tokenizer, self.stops, self.state, self.goes_on)
        self._writer, asked = writer, self.top_logprobs
        if reason == "stop":
            return Event(writer.end(), finish="stop")
        segments = writer.take(token)
        told = [] if asked is None else [logprobs_of(tokenizer, token, logprobs, asked)]
        if reason is not None and not writer.stopped:
            segments = segments + writer.end()
        finish = "stop" if writer.stopped else reason
        return Event(segments, told, finish, cut=finish is not None)
