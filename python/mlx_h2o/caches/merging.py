"""An eviction that merges: rows that go become part of the rows that are most like them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from ..operations import merging
from ..operations.backends import resolve
from ..operations.buffers import gathered, written
from ..operations.composed import beside_rows
from ..policies import Rows
from .stored import IMPORTANCE

if TYPE_CHECKING:
    from .eviction import Eviction, Ranked


def merge(
    eviction: Eviction, rows: Ranked, keep: int, due: Sequence[int]
) -> tuple[mx.array, mx.array]:
    """Merge all but ``keep`` of these rows into others, which change in place.

    Returns:
        The slots that stay, uint32 [lines, H, keep], and the positions of all rows then.
    """
    table, config = eviction.table, eviction.config
    start = eviction.start_of(due)
    places = rows.positions
    if IMPORTANCE not in table.beside:
        table.attach(IMPORTANCE, mx.zeros((*table.shape, 0)), 0.0)
    bias = rows.importance
    mass = merging.masses(eviction.policy.rank(cast(Rows, rows)), mx.exp(bias))
    free = (places >= config.sink_size) & (places < beside_rows(start))
    vectors = merging.features(rows.keys, rows.values)
    costs, slots = merging.partners(vectors, mass, free, config.shared_heads)
    kept = resolve().keep_indices(
        costs, places, keep=keep, sink_size=config.sink_size, recent_start=start
    )
    going = merging.others(kept, places.shape[2])
    into = merging.targets(going, costs, slots)
    same = (into[..., None] == into[..., None, :]) & (into != going)[..., None, :]
    same = same.astype(mx.float32)
    weights = gathered(mass, into), gathered(mass, going)
    lines = None if rows.lines is None else due
    for column, whole in ((table.tail.keys, rows.keys), (table.tail.values, rows.values)):
        new = merging.merged(gathered(whole, into), gathered(whole, going), same, weights)
        parts = column.encode(new.astype(column.layout[3]))
        column.parts = tuple(
            _written(part, into, some, lines)
            for part, some in zip(column.parts, parts, strict=True)
        )
    counts = mx.exp(bias)
    counts = gathered(counts, into) + (same @ gathered(counts, going)[..., None])[..., 0]
    table.beside[IMPORTANCE] = _written(table.beside[IMPORTANCE], into, mx.log(counts), lines)
    newest = mx.max(mx.where(same > 0, gathered(places, going)[..., None, :], -1), axis=3)
    newest = mx.maximum(gathered(places, into), newest)
    return kept, _written(table.positions(eviction.offsets), into, newest, lines)


def _written(
    array: mx.array, slots: mx.array, rows: mx.array, lines: Sequence[int] | None
) -> mx.array:
    """``rows`` at ``slots`` of some lines, None: of all."""
    if lines is None:
        return written(array, slots, rows)
    index = mx.array(list(lines))
    where = mx.zeros((array.shape[0], *slots.shape[1:]), slots.dtype)
    where[index] = slots
    found = gathered(array, where)  # of the other lines what is there
    found[index] = rows
    return written(array, where, found)
