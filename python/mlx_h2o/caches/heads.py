"""The KV heads of one layer in groups with different numbers of rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from ..config import H2OConfig
from .cache import BatchH2OKVCache, H2OKVCache, QuantizedH2OKVCache, evicting_cache
from .checks import check_alike
from .handed_out import EachLayersMask, hand_out, owner_of
from .saved import Restorable

_CLASSES = {cls.__name__: cls for cls in (H2OKVCache, QuantizedH2OKVCache, BatchH2OKVCache)}

Attend = Callable[[H2OKVCache, tuple[Any, Any], mx.array, Any, mx.array | None], mx.array]
"""Attention of one group, [B, hq, L, Dv]: takes its cache and rows, and the queries [B, hq, L, D],
mask and sinks of its heads."""


def _of_each(
    method: Callable[..., Any], of_all: Callable[[list[Any]], Any] | None = None
) -> Callable[..., Any]:
    """A method that calls ``method`` of each group, and returns ``of_all`` of the results; None:
    head groups of the results, or nothing if there are none."""

    def call(self: HeadGroups, *args: Any, **given: Any) -> Any:
        found = [getattr(one, method.__name__)(*args, **given) for one in self.caches]
        if of_all is not None:
            return of_all(found)
        return None if found[0] is None else HeadGroups(found, self.heads)

    call.__doc__ = f"As ``{method.__qualname__}``, of each group."
    return call


class HeadGroups(Restorable):
    """Several evicting caches for one layer, each for some of its KV heads.

    A single cache holds the same number of rows for all of its heads, so heads with different
    budgets are in separate caches. Attention runs once for each, and the outputs are put back in
    the order of the heads. The model must run within ``mlx_h2o.routing``: updates return empty
    arrays by which it finds the rows. In a batch the caches are :class:`BatchH2OKVCache`.

    Args:
        caches: one for each group, those with fewer rows first, which refuse a step first.
        heads: the KV heads of each group, ascending; all groups together hold every head once.

    Raises:
        ValueError: not one group for each cache, or a head that is missing or repeated.
    """

    def __init__(self, caches: Sequence[H2OKVCache], heads: Sequence[Sequence[int]]) -> None:
        self.caches = tuple(caches)
        self.heads = tuple(tuple(group) for group in heads)
        given = [head for group in self.heads for head in group]
        in_order = all([*one] == sorted(one) for one in heads)
        whole = in_order and sorted(given) == [*range(len(given))]
        if len(self.caches) != len(self.heads) or not whole:
            raise ValueError(
                f"[HeadGroups] found {len(self.caches)} caches of the KV heads {self.heads}, "
                "expected a group for each, in order, and every head from 0 on in one of them."
            )
        for one in self.caches:  # masks differ between groups
            one.unequal_budgets = True
        self._count = len(given)
        self._kv = [_index(group) for group in self.heads]
        self._queries: dict[int, tuple[list[Any], mx.array]] = {}

    @classmethod
    def of_rows(cls, configs: Sequence[H2OConfig], *, name: str = "") -> HeadGroups | H2OKVCache:
        """Empty caches for the settings of each KV head. Heads with equal settings share a cache;
        if all are equal, returns that cache alone."""
        groups: dict[H2OConfig, list[int]] = {}
        for head, config in enumerate(configs):
            groups.setdefault(config, []).append(head)
        if len(groups) == 1:
            return evicting_cache(configs[0], name=name)
        ordered = sorted(groups.items(), key=lambda one: one[0].max_kv_size or 2**31)
        caches = [
            evicting_cache(config, name=f"{name} KV heads {', '.join(map(str, heads))}".strip())
            for config, heads in ordered
        ]
        return cls(caches, [heads for _, heads in ordered])

    # Rows and attention

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As ``H2OKVCache.update_and_fetch`` of each group, for rows of all KV heads.

        Returns arrays [B, H, 1, 0] by which the attention of this package finds the rows. Raises
        ValueError for another number of heads.
        """
        if keys.shape[1:2] != (self._count,) or values.shape[:2] != keys.shape[:2]:
            raise ValueError(
                f"[HeadGroups.update_and_fetch] keys have shape {keys.shape} and values "
                f"{values.shape}, expected {self._count} KV heads as the budgets of "
                f"{self.caches[0].name or 'this layer'} have."
            )
        pairs = zip(self.caches, self._kv, strict=True)
        rows = [one.update_and_fetch(_taken(keys, own), _taken(values, own)) for one, own in pairs]
        none = keys[:, :, :1, :0]
        return hand_out(self, none, none, rows)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The arrays that stand for the rows. Raises ValueError if there are no rows yet."""
        rows = [one.keys_and_values() for one in self.caches]
        none = mx.zeros((self.caches[0]._table.shape[0], self._count, 1, 0))
        return hand_out(self, none, none, rows)

    def attended_by(
        self, attend: Attend, queries: mx.array, keys: mx.array, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Attention of all query heads, [B, Hq, L, Dv]: computed by group, in the order of heads.

        ``attend`` computes it for one group, over the rows that the last update of its cache
        returned. ``queries`` are [B, Hq, L, D], and ``keys`` the array that stands for the rows.
        A mask with an axis of Hq heads is split.
        """
        count, outs = queries.shape[1], []
        owns, order = self._of_queries(count)
        of_heads = isinstance(mask, mx.array) and mask.ndim > 2 and mask.shape[-3] == count > 1
        for cache, held, own in zip(self.caches, owner_of(keys)[1], owns, strict=True):
            part = _taken(mask, own, axis=mask.ndim - 3) if of_heads else mask
            found = None if sinks is None else sinks[own]
            outs.append(attend(cache, held, _taken(queries, own), part, found))
        return mx.take(mx.concatenate(outs, axis=1), order, axis=1)

    def _of_queries(self, count: int) -> tuple[list[Any], mx.array]:
        """The query heads of each group, and the order that puts their outputs back by head."""
        if count not in self._queries:
            each = count // self._count
            own = [[head * each + n for head in one for n in range(each)] for one in self.heads]
            order = mx.argsort(mx.array([head for heads in own for head in heads]))
            self._queries[count] = [_index(heads) for heads in own], order
        return self._queries[count]

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | EachLayersMask | None:
        """As ``H2OKVCache.make_mask``: never an array, which would not fit all groups."""
        return self.caches[0].make_mask(length, window_size, return_array)

    @property
    def bits(self) -> int:
        """Raises ValueError: mlx_lm's own attention reads this first, and knows no groups."""
        raise ValueError(
            f"[HeadGroups] {self.caches[0].name or 'a layer'} and others have KV heads of unequal "
            "budgets, of which mlx_lm's own attention does not know: expected the model to be "
            "called within mlx_h2o.routing(model), or equal rows (layers='equal')."
        )

    # What mlx_lm asks of a cache

    @property
    def offset(self) -> Any:
        """Tokens seen, the same in each cache."""
        return self.caches[0].offset

    @property
    def keys(self) -> Any:
        """The keys of the first group, which mlx_lm's pipelines set."""
        return self.caches[0].keys

    @keys.setter
    def keys(self, rows: Any) -> None:
        self.caches[0].keys = rows

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        return sum(one.nbytes for one in self.caches)

    size = _of_each(H2OKVCache.size, max)
    empty = _of_each(H2OKVCache.empty, all)
    is_trimmable = _of_each(H2OKVCache.is_trimmable, all)
    trim = _of_each(H2OKVCache.trim, max)
    flush = _of_each(H2OKVCache.flush)
    to_quantized = _of_each(H2OKVCache.to_quantized)
    unshared = _of_each(H2OKVCache.unshared)
    __deepcopy__ = _of_each(H2OKVCache.__deepcopy__)

    @property
    def state(self) -> list[Any]:
        """The heads and classes of the groups (JSON), and the state of each."""
        about = {"heads": self.heads, "classes": [type(one).__name__ for one in self.caches]}
        return [json.dumps(about), *(one.state for one in self.caches)]

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        about = json.loads(state[0])
        classes = [_CLASSES[name] for name in about["classes"]]
        if len(state) != 1 + len(classes):
            raise ValueError(
                f"[HeadGroups.state] found {len(state)} parts, expected {1 + len(classes)}: what "
                "the groups are, and the state of each."
            )
        pairs = zip(classes, state[1:], strict=True)
        HeadGroups.__init__(self, [one.from_state(part) for one, part in pairs], about["heads"])

    # Batches

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> HeadGroups:
        """A batch of caches with the same groups; errors as in ``H2OKVCache.merge``."""
        _check_alike("merge", caches)
        groups = zip(*(one.caches for one in caches), strict=True)
        return cls([H2OKVCache.merge(group) for group in groups], caches[0].heads)

    def extend(self, other: HeadGroups) -> None:
        """As ``BatchH2OKVCache.extend``, for each group."""
        _check_alike("extend", [self, other])
        for own, added in zip(self.caches, cast(Any, other.caches), strict=True):
            cast(BatchH2OKVCache, own).extend(added)

    extract = _of_each(BatchH2OKVCache.extract)
    filter = _of_each(BatchH2OKVCache.filter)
    prepare = _of_each(BatchH2OKVCache.prepare)
    finalize = _of_each(BatchH2OKVCache.finalize)


def _index(heads: Sequence[int]) -> Any:
    """An index of these ascending heads: a slice if they are evenly spaced, else their numbers."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    even = [*range(heads[0], heads[-1] + 1, step)] == [*heads]
    return slice(heads[0], heads[-1] + 1, step) if even else mx.array([*heads])


def _taken(array: mx.array, index: Any, axis: int = 1) -> mx.array:
    if isinstance(index, slice):
        return array[(slice(None),) * axis + (index,)]
    return mx.take(array, index, axis=axis)  # takes less host time than array[:, index]


def _check_alike(operation: str, caches: Sequence[Any]) -> None:
    op = f"[HeadGroups.{operation}]"
    if not caches:
        raise ValueError(f"{op} found no caches, expected at least one.")
    for one in caches:
        if not isinstance(one, HeadGroups) or one.heads != caches[0].heads:
            found = getattr(one, "heads", type(one).__name__)
            raise ValueError(f"{op} found {found}, expected the same groups of KV heads in all.")
    for group in zip(*(one.caches for one in caches), strict=True):
        check_alike(op, group)  # before any of them changes
