"""Measure, without a text, how much each KV head of a model retrieves, and what packing costs.

Most heads attend nearby; a few look far back for what came with a token before (induction heads,
Olsson et al. 2022). Reading random tokens twice reveals them: the first copy of a token is then the
only useful thing to attend to.
"""

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
"""Bits of packed rows whose errors are measured."""

AROUND = 2
"""Rows on each side of the first copy of a token that count as part of it."""
RETRIEVES = 0.3
"""A model retrieves if at least this part of some head's output comes from the first copy. Uniform
attention gives a tenth of that."""

_lock = threading.Lock()


class Watched(cast(Any, mlx_lm_cache.KVCache)):  # type: ignore[misc]
    """mlx_lm's own cache, for a layer that reads one sequence, or a batch of second copies.

    The first item of the batch attends to all rows. Each other item hides the first copy from the
    query heads of one KV head. All have the same rows, which are kept once.
    """

    ranks = ALONE
    heads = 0
    """KV heads of the whole layer, whose output every rank has."""
    queries: mx.array | None = None
    """Those that attended to the rows of one sequence."""
    gives: mx.array | None = None
    """float32 [H]: how much the layer's output changes if a head does not see the first copy."""
    copies: mx.array | None = None
    """float32: the largest change of a head's output without the first copy."""
    squares: mx.array | None = None
    """float32 [2 * len(BITS) + 1]: sums of squares of the changes of the output from packing keys,
    then values, and of the output itself."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.heads = keys.shape[1] * self.ranks.size
        return cast(tuple[mx.array, mx.array], super().update_and_fetch(keys[:1], values[:1]))

    def attend_for_probe(
        self, stock: Any, queries: mx.array, keys: mx.array, values: mx.array, **given: Any
    ) -> mx.array:
        """mlx_lm's attention, ``stock``, for the whole batch."""
        attention = functools.partial(stock, queries[:1], cache=self, **given)
        every: mx.array = attention(keys, values)
        if queries.shape[0] == 1:
            self.queries = queries
            return every
        length, rows = queries.shape[2], keys.shape[2]
        query, row = mx.arange(rows - length, rows)[:, None], mx.arange(rows)
        mask = given["mask"]
        seen = (row <= query) & (mx.abs(row - (query - length)) > AROUND)
        if isinstance(mask, mx.array):
            seen = seen & mask if mask.dtype == mx.bool_ else mx.where(seen, mask, -mx.inf)
        other: mx.array = attention(keys, values, mask=seen)
        self.squares = _packing_errors(attention, keys, values, every)
        self.copies = (_norm(every - other) / _norm(every)).mean(axis=2).max()
        own = mx.array([*self.ranks.own(range(self.heads))])
        of_head = mx.repeat(own, queries.shape[1] // own.size) == mx.arange(self.heads)[:, None]
        return mx.concatenate([every, mx.where(of_head[:, :, None, None], other, every)])


def _packing_errors(
    attention: Callable[[mx.array, mx.array], mx.array],
    keys: mx.array, values: mx.array, every: mx.array,
) -> mx.array:  # fmt: skip
    """float32 [2 * len(BITS) + 1]: sums of squares of the changes of the output ``every`` from
    packing the keys, then the values, in their frame, and of ``every`` itself."""
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
    """What the heads of a model gain from the first copy when it reads random tokens twice.

    gives: for each layer whose cache grows and each of its KV heads, including those of other
        processes, the relative change of the layer's output; 0 in a model that does not retrieve.
        Empty if it cannot be measured.
    errors: the relative change of attention's output from packing keys, then values, into each of
        ``BITS``. Empty if it cannot be measured.
    reason: why not, in words that follow the model's name; else empty.
    """

    gives: tuple[tuple[float, ...], ...]
    reason: str = ""
    errors: tuple[tuple[float, ...], ...] = ()


def gives(model: Any, vocabulary: int, tokens: int) -> Probe:
    """Probe a model with random tokens: `gives` is the mean of |y' - y| / |y| over the tokens of
    the second copy, where y is the layer's output, and y' its output if a head does not see the
    first copy. A layer of H KV heads reads the second copy 1 + H times.

    Args:
        model: an mlx_lm model, whose layers hand the rows of their caches to mlx_lm's attention.
        vocabulary: the size of its vocabulary.
        tokens: how many tokens to read twice.
    """
    watched, ranks = mlx_lm_cache.make_prompt_cache(model), ranks_of(model)
    growing: list[Any] = [one for one in watched if type(one) is mlx_lm_cache.KVCache]
    for one in growing:
        one.__class__, one.ranks = Watched, ranks.heads
    ends = min(1000, vocabulary // 8)  # where many tokens are special
    drawn = np.random.default_rng(0).integers(ends, vocabulary - ends, tokens)
    try:
        with _lock, routing(model), _side_by_side(list(model.layers)):
            read = [model(mx.array(drawn)[None], cache=watched) for _ in range(2)]
            read = read if ranks.by_layer else []  # which each process waits for, in this order
        hides = any(one.gives is None or one.copies is None for one in growing)
        why = "hides which of its layers attention is of" if hides else ""
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        why = f"cannot be probed: {error}"
    if why := max(ranks.gathered(why)):
        return Probe((), why)
    for logits in read:
        mx.eval(logits)
    mx.eval([(one.gives, one.copies, one.squares) for one in growing])
    own = ranks.heads.gathered(np.array([np.array(one.squares) for one in growing]))
    squares = np.array(ranks.of_layers(np.sum(own, axis=0)))
    errors = np.sqrt(squares[:, :-1] / squares[:, -1:]).mean(axis=0).reshape(2, len(BITS))
    retrieves = any(ranks.gathered(max(one.copies.item() for one in growing) >= RETRIEVES))
    given = [_rounded(retrieves * one.gives) for one in growing]
    return Probe(tuple(ranks.of_layers(given)), errors=tuple(map(_rounded, errors)))


@contextmanager
def _side_by_side(layers: Sequence[Any]) -> Iterator[None]:
    """Within the context, layers that have a watched cache read the second copy as the batch that
    this cache expects. Each layer gets a class of its own meanwhile, so that no other model is
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
        caches = [one for one in every if isinstance(one, Watched)]
        if len(caches) != 1 or not caches[0].offset:
            return original(layer, *args, **given)
        (cache,), like = caches, next(one.shape for one in every if isinstance(one, mx.array))
        axis = len(like) - 3  # in gemma3n several streams are before the batch

        def wide(one: Any) -> Any:  # hidden states, and in talkie embeddings too
            text = isinstance(one, mx.array) and one.shape == like
            return mx.repeat(one, 1 + cache.heads, axis=axis) if text else one

        args, given = cast(Any, tree_map)(wide, (args, given))
        found = original(layer, *args, **given)
        out, *more = found if isinstance(found, tuple) else (found,)  # more: for other layers
        out, others = mx.split(out, [1], axis)
        # Without the first tokens, where the model cannot know yet that this is the second copy.
        change, size = (_norm(rows[..., 8:, :]) for rows in (others - out, out))
        cache.gives = mx.moveaxis(change / size, axis, 0).flatten(1).mean(axis=1)
        return (out, *more) if more else out

    return call


def _norm(rows: mx.array) -> mx.array:
    return mx.linalg.norm(rows.astype(mx.float32), axis=-1)


def _rounded(numbers: Any) -> tuple[float, ...]:
    return tuple(round(one, 4) for one in cast(list[float], numbers.tolist()))
