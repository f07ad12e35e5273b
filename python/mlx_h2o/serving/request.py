"""A request for one answer, and its events."""

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
    """What a token adds to an answer: segments of text (kind, text), and logprobs if they were
    asked for; at the end finish, "stop" or "length", or error. cut: a stop text or the limit of
    tokens ended the answer, not the model."""

    segments: list[tuple[str, str]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    error: Exception | None = None
    cut: bool = False


@dataclass(eq=False)
class Request:
    """A request for one answer, and what the engine knows of it."""

    tokens: list[int]  # of the prompt
    sink: Callable[[Event], None]  # gets each event, in the engine's thread; must not block
    max_tokens: int = 512  # of the answer
    sampling: Sampling = field(default_factory=Sampling)  # how its tokens are chosen
    penalties: dict[str, Any] = field(default_factory=dict)  # for mlx_lm's make_logits_processors
    stops: Sequence[str] = ()  # texts that end the answer
    top_logprobs: int | None = None  # likeliest tokens to report with each; None: no logprobs
    state: str = "normal"  # the kind of text with which the answer begins
    goes_on: bool = False  # whether the answer continues the text of the prompt
    grammar: Any = None  # a matcher, whose copy constrains the answer; None: nothing does

    left: bool = False  # set once no client waits for the answer any more
    number: int = field(default_factory=itertools.count(1).__next__)  # the same in all ranks
    cached: int | None = None  # prompt tokens taken from a snapshot, once that is known
    answer: list[int] = field(default_factory=list)
    failure: Exception | None = None  # of its sampler or processors
    _trial: int = 0  # tokens that it has yet to make alone, since it was running in a failed step
    _nbytes: int = 0
    _failures: int = 0
    _writer: Writer | None = None
    _places: list[int] = field(default_factory=list)  # where to take snapshots of the prompt
    _filed: int = 0  # the last of them that is worth a file

    def __getstate__(self) -> dict[str, Any]:
        """For other ranks, which need no sink, and nothing that only the first one samples with."""
        without: dict[str, Any] = {"grammar": None, "penalties": {}, "top_logprobs": None}
        return self.__dict__ | without | {"sink": bool}  # a sink that does nothing

    @property
    def seen(self) -> list[int]:
        """The tokens of the prompt, and of the answer so far."""
        return self.tokens + self.answer

    @cached_property
    def prompt(self) -> Any:
        """The tokens of the prompt as an array, since they are compared at every step."""
        return np.array(self.tokens)

    def sampler(self, spared: list[int]) -> Callable[[mx.array], mx.array]:
        """The sampler of this request; xtc never removes ``spared`` tokens. A failure is noted, and
        ends this request alone."""
        sample = self.sampling.sampler(itertools.count(len(self.answer)), spared)
        if sample is greedy_sampler:  # one call for all rows of a batch
            return sample
        return self._guarded(sample, lambda logprobs: mx.zeros(logprobs.shape[:1], mx.uint32))

    def processors(self) -> list[Callable[[mx.array, mx.array], mx.array]]:
        """The logits processors of this request, guarded likewise."""
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

    def take(self, tokenizer: Any, token: int, logprobs: mx.array) -> Event:
        """The event of a token of the answer. logprobs: [V], of all tokens at its position."""
        self.answer.append(token)
        self._trial = max(0, self._trial - 1)
        writer = self._writer or Writer(tokenizer, self.stops, self.state, self.goes_on)
        self._writer, asked = writer, self.top_logprobs
        if token in tokenizer.eos_token_ids:  # it has no text
            return Event(writer.end(), finish="stop")
        segments = writer.take(token)
        told = [] if asked is None else [logprobs_of(tokenizer, token, logprobs, asked)]
        is_last = len(self.answer) >= self.max_tokens
        if is_last or writer.stopped:
            segments = segments + writer.end()
        finish = "stop" if writer.stopped else "length" if is_last else None
        return Event(segments, told, finish, cut=finish is not None)
