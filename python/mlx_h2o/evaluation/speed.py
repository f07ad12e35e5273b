"""Measure speed and memory of a model with several kinds of caches, which take turns."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from ..caches.cache import PROMPT_CHUNK
from ..lm.generate import read
from ..lm.routing import routing_for
from .statistics import in_turns

Make = Callable[[], list[Any]]
"""Makes new caches, one per layer."""


class Timed:
    """Caches of one kind, which read a prompt and continue it.

    prefill, decode: seconds of each turn.
    peaks: the most bytes in any turn, weights included, other kinds of caches excluded.
    tokens: the tokens that were written.
    """

    def __init__(self, model: Any, make: Make, prompt: mx.array, sampler: Any = None) -> None:
        self._model, self._make, self._prompt = model, make, prompt
        self._sampler = sampler
        self._steps: Iterator[Any] | None = None
        self._at = self._own = 0
        self._weights = mx.get_active_memory()
        self.caches: list[Any] = []
        self.prefill: list[float] = []
        self.decode: list[float] = []
        self.peaks = {"prefill": 0, "decode": 0}
        self.tokens: list[int] = []

    def read(self) -> None:
        """Read the next chunk of the prompt as mlx_lm does; after the last, begin again."""
        if self._at == 0:
            self._own, self.caches = 0, self._make()
        end = min(self._at + PROMPT_CHUNK, len(self._prompt) - 1)
        with self._turn("prefill", self.prefill):
            read(self._model, self.caches, self._prompt[None, self._at : end], PROMPT_CHUNK)
        self._at = end % (len(self._prompt) - 1)

    def write(self, count: int) -> None:
        """Write ``count`` tokens, after one that is not timed: another kind's turn may delay it."""
        given = {"max_tokens": -1, "prompt_cache": self.caches, "sampler": self._sampler}
        self._steps = self._steps or generate_step(self._prompt[-1:], self._model, **given)
        with self._turn("decode", []):
            self.tokens.append(int(next(self._steps)[0]))
        with self._turn("decode", self.decode):
            self.tokens += [int(next(self._steps)[0]) for _ in range(count)]
            mx.synchronize()

    @contextlib.contextmanager
    def _turn(self, kind: str, times: list[float]) -> Iterator[None]:
        others = mx.get_active_memory() - self._own - self._weights
        mx.reset_peak_memory()
        with routing_for(self._model, self.caches):
            start = time.perf_counter()
            yield
            times.append(time.perf_counter() - start)
        self.peaks[kind] = max(self.peaks[kind], mx.get_peak_memory() - others)
        mx.clear_cache()
        self._own = mx.get_active_memory() - others - self._weights


def timed(
    model: Any,
    makes: Mapping[str, Make],
    prompt: mx.array,
    *,
    rounds: int = 1,
    turns: int = 5,
    tokens: int = 16,
    sampler: Callable[[mx.array], mx.array] | None = None,
) -> dict[str, Timed]:
    """Time caches of each kind: `rounds` readings of a prompt [N + 1], then `turns` of `tokens`.

    They take turns, chunk by chunk of the prompt, so that other load on the machine affects all of
    them alike.

    Args:
        sampler: chooses tokens by log probabilities [B, V]; None: the most likely ones.
    """
    mx.eval(model.parameters(), prompt)
    kinds = {name: Timed(model, make, prompt, sampler) for name, make in makes.items()}
    chunks = -(-(len(prompt) - 1) // PROMPT_CHUNK)
    in_turns({name: one.read for name, one in kinds.items()}, rounds * chunks)
    in_turns({name: partial(one.write, tokens) for name, one in kinds.items()}, turns)
    return kinds
