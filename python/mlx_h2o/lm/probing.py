"""What each KV head of a model retrieves, and what bits cost, found without a text.

Most heads attend nearby; a few look far back for what came with a token before (induction heads,
Olsson et al. 2022). A model that reads random tokens twice shows them: there, all that is of use is
at the first copy of a token.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import cache as mlx_lm_cache

from ..caches.frame import Frame
from .ranks import ALONE, ranks_of
from .routing import routing

BITS = (3, 4, 5, 6, 8)
"""Of packed rows, whose errors are measured."""

AROUND = 2
"""Rows to each side of the first copy of a token that count as it."""
RETRIEVES = 0.3
"""How much of some head's output, at least, is from the first copy, or the model does not retrieve.
Flat attention gives a tenth of that."""

_lock = threading.Lock()


class _Watched(cast(Any, mlx_lm_cache.KVCache)):  # type: ignore[misc]
    """mlx_lm's own cache, of a layer that reads the second copy several times side by side.

    The first of these attends to all rows; each other one, for the query heads of one KV head, to
    all but those of the first copy. All have the same rows, kept once.
    """

    ranks = ALONE
    heads = 0
    """Of the whole layer, whose output every rank has."""
    gives: mx.array | None = None
    """float32 [H]: how much the layer's output changes without the first copy for a head."""
    copies: mx.array | None = None
    """float32: the most that a head's output changes without the first copy."""
    squares: mx.array | None = None
    """float32 [2 * len(BITS) + 1]: sums of squares, of what packing keys, and values, changes of
    the output, and of that."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.heads = keys.shape[1] * self.ranks.size
        return cast(tuple[mx.array, mx.array], super().update_and_fetch(keys[:1], values[:1]))

    def attend_for_probe(
        self, stock: Any, queries: mx.array, keys: mx.array, values: mx.array, **given: Any
    ) -> mx.array:
        """mlx_lm's attention, ``stock``, of all that is read side by side."""
        attention = functools.partial(stock, queries[:1], keys, values, cache=self)
        every: mx.array = attention(**given)
        if queries.shape[0] == 1:
            return every
        length, rows = queries.shape[2], keys.shape[2]
        query, row = mx.arange(rows - length, rows)[:, None], mx.arange(rows)
        mask = given["mask"]

        def seeing(rows: mx.array) -> mx.array:
            seen = (row <= query) & rows
            if isinstance(mask, mx.array):
                seen = seen & mask if mask.dtype == mx.bool_ else mx.where(seen, mask, -mx.inf)
            return cast(mx.array, attention(**{**given, "mask": seen}))

        self.squares = _packing_errors(
            functools.partial(stock, queries[:1], cache=self, **given), keys, values, every
        )
        other = seeing(mx.abs(row - (query - length)) > AROUND)
        self.copies = (_norm(every - other) / _norm(every)).mean(axis=2).max()
        here = self.heads // self.ranks.size
        own = mx.arange(queries.shape[1]) // (queries.shape[1] // here) + self.ranks.rank * here
        of_head = (own == mx.arange(self.heads)[:, None])[:, :, None, None]
        return mx.concatenate([every, mx.where(of_head, other, every)])


def _packing_errors(
    attention: Callable[[mx.array, mx.array], mx.array],
    keys: mx.array, values: mx.array, every: mx.array,
) -> mx.array:  # fmt: skip
    """float32 [2 * len(BITS) + 1]: sums of squares, of the changes of an output ``every`` where the
    keys, or the values, are packed rows in their frame, and of that."""
    frame = Frame.of(keys, values)
    kept, found = frame.into(keys, values), []
    for side in (0, 1):
        for bits in BITS:
            group = 64 if kept[side].shape[3] % 64 == 0 else 32
            packed = mx.quantize(kept[side], group_size=group, bits=bits)
            rows = [keys, values]
            rows[side] = frame.back(mx.dequantize(*packed, group_size=group, bits=bits), side)
            found.append(attention(*rows) - every)
    return mx.stack([mx.square(one.astype(mx.float32)).sum() for one in (*found, every)])


@dataclass(frozen=True)
class Probe:
    """What the first copy gives to the heads of a model that reads random tokens twice.

    gives: per layer whose cache grows, and of each of its KV heads, those of other processes too,
        by how much it changes the layer's output, as a part of that; 0 in a model that does not
        retrieve. Empty if that cannot be found out.
    errors: what packing keys, and values, into ``BITS`` changes of the output of attention,
        as a part of it. Empty if that cannot be found out.
    reason: why not, in words that follow the model's name; else empty.
    """

    gives: tuple[tuple[float, ...], ...]
    reason: str = ""
    errors: tuple[tuple[float, ...], ...] = ()


def gives(model: Any, vocabulary: int, tokens: int) -> Probe:
    """The probe of a model, by random tokens: `gives` is the mean of |y' - y| / |y| over those of
    the second copy, y the layer's output and y' that without the first copy for a head. The layer
    reads the second copy 1 + H times, H its KV heads.

    Args:
        model: an mlx_lm model, whose layers hand the rows of their caches to mlx_lm's attention.
        vocabulary: how many tokens there are.
        tokens: how many to say twice.
    """
    caches = mlx_lm_cache.make_prompt_cache(model)
    plain, ranks = mlx_lm_cache.KVCache, ranks_of(model)
    watched = [_Watched() if type(one) is plain else one for one in caches]
    growing = [one for one in watched if isinstance(one, _Watched)]
    for one in growing:
        one.ranks = ranks
    ends = min(1000, vocabulary // 8)  # where many tokens have a meaning of their own
    drawn = np.random.default_rng(0).integers(ends, vocabulary - ends, tokens)
    try:
        with _lock, routing(model), _side_by_side(list(model.layers)):
            for _ in range(2):
                model(mx.array(drawn)[None], cache=watched)  # nobody evaluates its logits
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        return Probe((), f"cannot be probed: {error}")
    if any(one.gives is None or one.copies is None for one in growing):
        return Probe((), "hides which of its layers attention is of")
    most = mx.stack([cast(mx.array, one.copies) for one in growing]).max()
    squares = mx.stack([cast(mx.array, one.squares) for one in growing])
    mx.eval([one.gives for one in growing], most, squares)
    squares = ranks.sums(squares)
    errors = mx.sqrt(squares[:, :-1] / squares[:, -1:]).mean(axis=0).reshape(2, len(BITS))
    part = 1.0 if cast(float, ranks.largest(most).item()) >= RETRIEVES else 0.0
    given = (_rounded(part * cast(mx.array, one.gives)) for one in growing)
    return Probe(tuple(given), errors=tuple(map(_rounded, errors)))


@contextmanager
def _side_by_side(layers: Sequence[Any]) -> Iterator[None]:
    """Within the context, those of these layers that have a watched cache read the second copy of a
    text as such a cache asks for. They are of classes of their own meanwhile: no other model is
    changed."""
    classes = [type(layer) for layer in layers]
    try:
        for layer, cls in zip(layers, classes, strict=True):
            own = {"__call__": _reading(cast(Any, cls).__call__), "__module__": cls.__module__}
            object.__setattr__(layer, "__class__", type(cls.__name__, (cls,), own))
        yield
    finally:
        for layer, cls in zip(layers, classes, strict=True):
            object.__setattr__(layer, "__class__", cls)


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(layer: Any, *args: Any, **given: Any) -> Any:
        every = [*args, *given.values()]
        caches = [one for one in every if isinstance(one, _Watched)]
        if len(caches) != 1 or not caches[0].offset:
            return original(layer, *args, **given)
        (cache,), like = caches, next(one.shape for one in every if isinstance(one, mx.array))

        def wide(one: Any) -> Any:  # the text, in talkie beside its embeddings
            text = isinstance(one, mx.array) and one.shape == like
            return mx.repeat(one, 1 + cache.heads, axis=0) if text else one

        args, given = cast(Any, tree_map)(wide, (args, given))
        found = original(layer, *args, **given)
        out, *more = found if isinstance(found, tuple) else (found,)  # more: for other layers
        # Without the first tokens, which cannot know yet that it is the second copy.
        change, size = (_norm(rows[:, 8:]) for rows in (out[1:] - out[:1], out[:1]))
        cache.gives = (change / size).mean(axis=1)
        return (out[:1], *more) if more else out[:1]

    return call


def _norm(rows: mx.array) -> mx.array:
    return mx.linalg.norm(rows.astype(mx.float32), axis=-1)


def _rounded(numbers: mx.array) -> tuple[float, ...]:
    return tuple(round(one, 4) for one in cast(list[float], numbers.tolist()))
