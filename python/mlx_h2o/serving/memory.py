"""Plan what fits in memory: weights, running requests, prefill chunks and snapshots."""

import math
import os
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np

from ..lm.outline import Outline, total_bytes
from ..lm.ranks import ranks_of
from ..lm.routing import bounds, int_setting

_PROMPTS, _ANSWERS = 8, 32  # defaults for prompts that are prefilled, and answers decoded, together
_FREED = 16  # MLX's cache of freed buffers gets a 16th of the limit
COPIED = 1.5
"""A sequence takes 1.5 times its bytes, since batches are copied, one layer after the other."""
_STEP = 256  # lengths are rounded up to a multiple of this many tokens
_OF_LOGITS = 24  # bytes per sequence and token id: logits, what is made of them, and those before
_FAR = 1024  # tokens over which the growth of unbounded caches is measured


def usual_bytes() -> int:
    """Three quarters of this machine's memory, which is the default limit."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4


class Memory:
    """The memory of a server, and what requests take of it.

    Nothing is computed: the bytes come from caches in a lazy graph that is never evaluated.

    Args:
        models: the model and, if there is one, a draft model.
        make: makes new caches; those of the draft model follow the model's.
        limit: bytes of all arrays together, weights included.
        decode: answers decoded together; None: 32, or fewer to leave room for one sequence.
        prompts: prompts prefilled together; None: 8, or fewer to take at most half of the room.
        queue: requests that may wait besides these.
        step, drafts: tokens per prefill chunk, and per draft.

    Attributes:
        prompts, decode: the numbers that fit. The other arguments are attributes too.
        lowered: whether they are below the defaults.
        rows: tokens of which full caches hold rows, on average; sys.maxsize if some are unbounded.
        reserved: bytes that prefill and sampling take.
        free: bytes that are left for caches.

    Raises:
        ValueError: weights, prefill and sampling leave no room for caches.
    """

    def __init__(
        self, models: Sequence[Any], make: Callable[[], list[Any]], limit: int, *,
        decode: int | None = None, prompts: int | None = None, queue: int = 512, step: int = 2048,
        drafts: int = 3,
    ) -> None:  # fmt: skip
        self.models, self.make, self.limit = models, make, limit
        self.queue, self.step, self.drafts = queue, step, drafts
        outlines = [Outline(model) for model in models]
        firsts, sizes = zip(*(bounds(make()) or [(0, 0)]), strict=True)
        # With several ranks, plan for the one that has the least room.
        least = ranks_of(models[0]).least
        self._lasting, rows = least(min(firsts), -max(sizes))
        self._rows = -rows
        full, weights = self._rows + 1, sum(one.weights for one in outlines)
        self._full = _held(outlines, make, full)
        self._early = _held(outlines, make, max(1, self._lasting - 1))
        self._more = (_held(outlines, make, full + _FAR) - self._full) / _FAR
        chunk = min(full, step)
        read = _held(outlines, make, chunk, step) - _held(outlines, make, chunk)
        of_prompt = max(0, read) + _activations(models[0], step, step + chunk)
        of_answer = _OF_LOGITS * (int_setting(models[0], "vocab_size") or 1 << 17)
        beside = limit - limit // _FREED - weights
        beside, *less = least(beside, -of_prompt, -self._full, -self._early, -math.ceil(self._more))
        of_prompt, self._full, self._early, self._more = (-n for n in less)
        self.rows = sys.maxsize if self._more > 0 else sum(sizes) // len(sizes)
        sequence = self.of_request(max(full, step))

        def fit(most: int, each: int, others: int) -> int:
            return max(1, min(most, (beside - others) // each))

        answers = decode or _ANSWERS
        most = min(prompts or _PROMPTS, answers)
        self.prompts = most if prompts else fit(most, 2 * of_prompt, 0)
        others = self.prompts * of_prompt + sequence
        self.decode = decode or fit(answers, of_answer, others)
        self.lowered = (self.prompts, self.decode) != (most, answers)
        self.reserved = self.prompts * of_prompt + self.decode * of_answer
        self.free = beside - self.reserved
        if self.free <= 0:
            own = ", three quarters of this machine's" if limit == usual_bytes() else ""
            needed = (limit - limit // _FREED - self.free) * _FREED // (_FREED - 1)
            raise ValueError(
                f"--memory is {limit:,} bytes{own}, expected more than {needed:,}: weights take "
                f"{weights:,}, and reading prompts, {self.prompts} at a time, takes "
                f"{self.reserved:,} (less with a smaller --prefill-step-size, or fewer at a time)."
            )

    def apply(self) -> None:
        """Set MLX's memory limits."""
        mx.set_memory_limit(self.limit)
        mx.set_cache_limit(self.limit // _FREED)
        if mx.metal.is_available():
            most = int(mx.device_info()["max_recommended_working_set_size"])
            mx.set_wired_limit(min(self.limit, most))

    def of_request(self, tokens: int) -> int:
        """Bytes that a sequence of this many tokens takes."""
        tokens = -(-tokens // _STEP) * _STEP
        ends = 0, self._lasting, self._rows + 1
        bounded = np.interp(tokens, ends, (0, self._early, self._full))
        return int(COPIED * (bounded + self._more * max(0, tokens - self._rows)))


def _held(outlines: list[Outline], make: Callable[[], list[Any]], *counts: int) -> int:
    """Bytes of new caches after chunks of these many tokens; one more follows a single chunk."""
    counts = counts if len(counts) > 1 else (*counts, 1)
    caches = iter(make())
    pairs = ((one, [*islice(caches, len(one.kept))]) for one in outlines)
    return sum(total_bytes([*one.fed(own, *counts)][-1]) for one, own in pairs)


def _activations(model: Any, step: int, rows: int) -> int:
    """Bytes besides the caches while one chunk is prefilled: a layer's activations, and the
    attention weights of all heads, as an unfused attention materializes them."""
    width = int_setting(model, "hidden_size") or 1024
    inner = int_setting(model, "intermediate_size") or 4 * width
    heads = int_setting(model, "num_attention_heads") or 32
    return 4 * step * (6 * width + 3 * inner + 2 * heads * rows)
