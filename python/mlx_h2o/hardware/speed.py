"""Speed and memory of a model with caches of several kinds, which take turns."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache

from ..caches.cache import PROMPT_CHUNK
from ..evaluation.statistics import spread
from ..lm.checks import vocabulary
from ..lm.prompt_cache import make_prompt_cache
from ..lm.routing import routing

STOCK, STOCK_8 = "mlx_lm", "mlx_lm, 8 bits"
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, 6 and 5 bits": {"kv_bits": 6, "v_bits": 5, "policy": "h2o"},
    "ours, turbo3": {"kv_format": "turbo3", "policy": "h2o"},
}
"""Settings of our caches, which keep a quarter of the rows."""


class Arm:
    """Caches of one kind, the times of turns with them, and the most memory that they took."""

    def __init__(self, name: str, model: Any, length: int) -> None:
        self.name, self._model, self._length = name, model, length
        self.prefill: list[float] = []
        self.decode: list[float] = []
        self.peak = 0
        self.begin()

    def begin(self) -> None:
        self._own = 0
        if self.name in OURS:
            rows = max(16, self._length // 4)
            self.caches = make_prompt_cache(self._model, rows, **OURS[self.name])
            return
        self.caches = mlx_lm_cache.make_prompt_cache(self._model)
        if self.name == STOCK_8:
            grows = [type(one) is mlx_lm_cache.KVCache for one in self.caches]
            pairs = zip(self.caches, grows, strict=True)
            self.caches = [one.to_quantized(64, 8) if grow else one for one, grow in pairs]

    def read(self, chunk: mx.array) -> None:
        """As mlx_lm reads a prompt."""
        with self._turn(self.prefill):
            self._model(chunk[None], cache=self.caches)
            mx.eval([one.state for one in self.caches])

    def write(self, last: mx.array | None, count: int) -> None:
        """This many tokens, after the prompt or after those of the turn before."""
        if last is not None:
            self._tokens: Any = generate_step(
                last, self._model, max_tokens=-1, prompt_cache=self.caches
            )
        with self._turn([]):  # may wait for the arm before
            next(self._tokens)
        with self._turn(self.decode):
            for _ in range(count):
                next(self._tokens)
            mx.synchronize()

    @contextlib.contextmanager
    def _turn(self, times: list[float]) -> Iterator[None]:
        others = mx.get_active_memory() - self._own
        mx.reset_peak_memory()
        with routing(self._model) if self.name in OURS else contextlib.nullcontext():
            start = time.perf_counter()
            yield
            times.append(time.perf_counter() - start)
        self.peak = max(self.peak, mx.get_peak_memory() - others)
        mx.clear_cache()
        self._own = mx.get_active_memory() - others


def measure(
    model: Any, lengths: Sequence[int], repeats: int, tokens: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Tokens a second, bytes and ratios to mlx_lm's turns, of each length and arm.

    Args:
        model: an mlx_lm model.
        lengths: tokens of prompts, which are drawn.
        repeats: turns of decoding, and the least number of chunks of prompts.
        tokens: that are written in a turn.
        say: called with what goes on.
    """
    mx.eval(model.parameters())
    found: dict[str, Any] = {"weights": mx.get_active_memory(), "lengths": {}}
    for length in (min(lengths), *lengths):  # the first warms up
        say(f"{length} tokens")
        rounds = math.ceil(repeats / math.ceil(length / PROMPT_CHUNK))
        arms = _run(model, length, rounds, repeats, tokens, say)
        found["lengths"][str(length)] = {
            arm.name: {
                "prefill": round(length * rounds / sum(arm.prefill), 2),
                "prefill_to_mlx_lm": _ratios(arms[0].prefill, arm.prefill),
                "decode": round(tokens * repeats / sum(arm.decode), 2),
                "decode_to_mlx_lm": _ratios(arms[0].decode, arm.decode),
                "cache": sum(one.nbytes for one in arm.caches),
                "peak": found["weights"] + arm.peak,
            }
            for arm in arms
        }
    return found


def _run(
    model: Any, length: int, rounds: int, repeats: int, tokens: int, say: Callable[[str], None]
) -> list[Arm]:
    """The arms that the model has, mlx_lm's first, after these readings of a prompt and turns."""
    arms: list[Arm] = []
    for name in (STOCK, STOCK_8, *OURS):
        try:
            arms.append(Arm(name, model, length))
        except (NotImplementedError, ValueError) as error:
            say(f"not {name}: {error}")
    mx.random.seed(0)
    prompt = mx.random.randint(0, vocabulary(model), (length + 1,))
    orders = itertools.cycle(arms[at:] + arms[:at] for at in range(len(arms)))
    for again in range(rounds):
        for start in range(0, length, PROMPT_CHUNK):
            for arm in next(orders):
                if again and not start:
                    arm.begin()
                arm.read(prompt[start : min(start + PROMPT_CHUNK, length)])
    for turn in range(repeats):
        for arm in next(orders):
            arm.write(None if turn else prompt[length:], tokens)
    return arms


def _ratios(stock: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """How many times as fast, turn by turn."""
    return spread([theirs / own for theirs, own in zip(stock, ours, strict=True)], 3)
