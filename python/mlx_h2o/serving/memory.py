"""What fits: bytes of weights, of running requests, of chunks of prompts, and of snapshots."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..lm.outline import Outline, evicting_caches, nbytes
from ..lm.ranks import ranks_of
from ..lm.routing import int_setting

__all__ = ["COPIED", "Memory", "bounds", "usual_bytes"]

_FREED = 16
"""MLX keeps one in so many of the bytes for buffers that were freed."""
COPIED = 1.5
"""Times its bytes: what a sequence takes, since batches are copied, one layer after the other."""
_STEP = 256
"""Tokens by which lengths are rounded up."""
_OF_LOGITS = 24
"""Bytes of a sequence for each token of the vocabulary: logits, what becomes of them, and those of
the token before."""
_FAR = 1024
"""Tokens over which it is measured how caches grow that no budget bounds."""


def usual_bytes() -> int:
    """Three quarters of this machine's memory: the limit where none is given."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4


class Memory:
    """The bytes of a server, and what requests take of them.

    Nothing is computed: the bytes are those of caches in a graph that is never evaluated.

    Args:
        models: the model and, if there is one, a draft model.
        make: their caches, one list for each.
        limit: bytes of all arrays together, weights included.
        step: tokens of a prompt that are read at a time.
        prompts: prompts that are read together.
        decode: answers that are made together.

    Raises:
        ValueError: the weights and one chunk of a prompt do not fit.
    """

    def __init__(
        self, models: list[Any], make: Callable[[], list[list[Any]]], limit: int,
        step: int, prompts: int, decode: int,
    ) -> None:  # fmt: skip
        self.limit = limit
        weights = sum(
            array.nbytes
            for model in models
            for _, array in cast(Any, tree_flatten)(model.parameters())
        )
        self._rows = max(bounds([one for caches in make() for one in caches]), default=0)
        full, outlines = self._rows + 1, [Outline(model) for model in models]
        self._full = _held(outlines, make, full)
        self._more = (_held(outlines, make, full + _FAR) - self._full) / _FAR
        chunk = min(full, step)
        read = _held(outlines, make, chunk, step) - _held(outlines, make, chunk)
        self.reserved = prompts * (max(0, read) + _activations(models[0], step, step + chunk))
        self.reserved += _OF_LOGITS * decode * (int_setting(models[0], "vocab_size") or 1 << 17)
        free = limit - limit // _FREED - weights - self.reserved
        # Of several ranks, what fits in each.
        least = ranks_of(models[0]).least
        self.free, full, more, rows = least(free, -self._full, -math.ceil(self._more), -self._rows)
        self._full, self._more, self._rows = -full, -more, -rows
        if self.free <= 0:
            own = ", three quarters of this machine's" if limit == usual_bytes() else ""
            raise ValueError(
                f"--memory is {limit:,} bytes{own}, expected more than {limit - self.free:,}: the "
                f"weights have {weights:,}, and reading prompts, {prompts} at a time, takes "
                f"{self.reserved:,} (less with --prompt-concurrency or --prefill-step-size)."
            )

    def apply(self) -> None:
        """Have MLX keep to it."""
        mx.set_memory_limit(self.limit)
        mx.set_cache_limit(self.limit // _FREED)
        if mx.metal.is_available():
            most = int(mx.device_info()["max_recommended_working_set_size"])
            mx.set_wired_limit(min(self.limit, most))

    def of_request(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens takes."""
        tokens = -(-tokens // _STEP) * _STEP
        bounded = self._full * min(1.0, tokens / (self._rows + 1))
        return int(COPIED * (bounded + self._more * max(0, tokens - self._rows)))


def _held(outlines: list[Outline], make: Callable[[], list[list[Any]]], *counts: int) -> int:
    """Bytes of new caches behind so many tokens, read in parts of these counts, and behind one more
    if there is one part."""
    counts = counts if len(counts) > 1 else (*counts, 1)
    pairs = zip(outlines, make(), strict=True)
    return sum(nbytes([*one.fed(caches, *counts)][-1]) for one, caches in pairs)


def bounds(caches: Sequence[Any]) -> list[int]:
    """Tokens from which on those caches are full that are bounded, ours and mlx_lm's."""
    sizes = [one.config.max_kv_size for one in evicting_caches(caches)]
    sizes += [getattr(one, "max_size", None) for one in caches]
    return [size for size in sizes if size is not None]


def _activations(model: Any, step: int, rows: int) -> int:
    """Bytes beside the caches while one prompt's chunk is read: what a layer computes, and the
    weights of all its heads where attention computes them whole."""
    width = int_setting(model, "hidden_size") or 1024
    inner = int_setting(model, "intermediate_size") or 4 * width
    heads = int_setting(model, "num_attention_heads") or 32
    return 4 * step * (6 * width + 3 * inner + 2 * heads * rows)
