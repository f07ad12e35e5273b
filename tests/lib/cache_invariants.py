"""Invariants of an evicting cache, as code that raises AssertionError."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten


def arrays_of(state: Any) -> list[mx.array]:
    """The keys, values, scores and positions of a state, packed parts one by one."""
    return [array for _, array in tree_flatten(list(state[:4]))]


def seen_from_outside(cache) -> dict[str, Any]:
    """The values of all getters."""
    found = {
        "size": cache.size(), "nbytes": cache.nbytes, "evicted": cache.evicted,
        "empty": cache.empty(), "trimmable": cache.is_trimmable(),
        "offset": np.array(cache.offset), "settings": repr(cache.state[4:]),
    }  # fmt: skip
    if not cache.empty():
        arrays = [cache.keys, cache.values, cache.scores, cache.positions, cache.state[:4]]
        found |= {name: np.array(array) for name, array in tree_flatten(arrays)}
    return found


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two results of ``seen_from_outside`` are equal."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        # Most are bitwise equal, which NumPy's check would take far longer to find.
        if not _same_bits(value, other[name]):
            np.testing.assert_array_equal(value, other[name], err_msg=name)


def check_same_rows(one, other) -> None:
    """Check that all rows, shared or not, are the same to the bit."""
    for name in ("keys", "values", "scores", "positions"):
        sides = (tree_flatten([getattr(cache, name)]) for cache in (one, other))
        for (_, found), (_, expected) in zip(*sides, strict=True):
            np.testing.assert_array_equal(np.array(found), np.array(expected), err_msg=name)


def _same_bits(one: Any, other: Any) -> bool:
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return False
    return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes()


def check_invariants(
    cache,
    *,
    newest: Sequence[int] | None = None,
    window: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> None:
    """Check the invariants of a cache between two events.

    Args:
        cache: with float32 or packed rows.
        newest: rows of each sequence that the event added, which are in its last slots.
        window: where the protected rows of each sequence begin; None: the recent window.
        offsets: tokens that each sequence has seen; None: as the cache says.
    """
    config = cache.config
    mixed = bool(config.light_bits or config.dense_rows)
    if config.preallocate and not cache.empty():
        seen_from_outside(cache)  # reading touches pages, which count as its bytes
    check_same(seen_from_outside(cache), seen_from_outside(cache))  # reading changes nothing
    if cache.empty():
        assert (cache.size(), cache.nbytes) == (0, 0)
        return
    positions = np.array(cache.positions)
    if offsets is None:
        offsets = np.broadcast_to(np.array(cache.offset), positions.shape[:1]).tolist()
    lengths = (positions >= 0).sum(axis=2)
    assert cache.size() == lengths.max()
    assert cache.size() <= max([config.max_kv_size, *(rows for _, rows in config.rows_at)])
    assert cache.row_bias is None or cache.row_bias.shape[2] >= cache.size()
    for b, offset in enumerate(offsets):
        (length,) = set(lengths[b].tolist())  # equal in all heads
        start = offset - config.recent_size if window is None else window[b]
        first = max(config.budget.sink_size, config.prefix_size)
        protected = {*range(min(first, offset)), *range(max(0, start), offset)}
        for found in positions[b].tolist():
            rows = [position for position in found if position >= 0]
            if not mixed:  # mixed precision has unused slots in each segment
                assert len(found) == cache.size()
                assert found[length:] == [-1] * (len(found) - length)
            assert len(set(rows)) == length and max(rows, default=-1) < offset
            assert protected <= set(rows), f"gone: {protected - set(rows)}"
            if length == offset and not mixed:
                assert rows == list(range(offset))  # in order before the first eviction
            if newest is not None:
                assert rows[length - newest[b] :] == list(range(offset - newest[b], offset))
    held = sum(array.nbytes for array in held_arrays(cache._table))
    if cache.prefix_rows:  # counted once for all sequences
        held += sum(array.nbytes for _, array in tree_flatten(list(cache._table.prefix.view())))
    else:
        rows = [array for _, array in tree_flatten([cache.keys, cache.values])]
        assert cache.nbytes >= sum(array.nbytes for array in rows)
    assert cache.nbytes <= held if config.preallocate else cache.nbytes == held


def held_arrays(table: Any) -> list[mx.array]:
    """Every array that a table's attributes lead to, except what attention has just read and what
    is shared."""
    found: dict[int, mx.array] = {}
    waiting, known = [vars(table) | {"prefix": None}], {id(table)}
    while waiting:
        one = waiting.pop()
        if isinstance(one, mx.array):
            found[id(one)] = one
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        elif hasattr(one, "__dict__") and not isinstance(one, type) and id(one) not in known:
            known.add(id(one))
            waiting.append(vars(one) | {"read": None})
    return list(found.values())
