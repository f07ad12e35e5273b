"""Rows of several sequences in a cache for those that stand alike: updates, attention, scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..stores.storage import Stored
from . import handed_out
from .alike import Alike, grouped, parted
from .batch import BatchH2OKVCache
from .batch_rows import PADDING, Line
from .checks import check_rows

__all__ = ["GroupedRows"]


class _Part(NamedTuple):
    """The tokens ``start`` up to ``stop`` of the last update are a group's own, and its rows are
    the slots ``low`` up to ``high`` of the arrays handed out."""

    group: Alike
    start: int
    stop: int
    low: int
    high: int


class GroupedRows(BatchH2OKVCache):
    """Each group of sequences is served by a cache of its own, which knows of no padding.

    So each sequence is quantised and evicted as it would be alone. Groups become one as soon as
    they may, at the latest when their sequences are at the budget: then a step takes the operations
    of one cache. What is handed out is laid out as other batches are, with padding on the left;
    where attention is ours nobody computes it.
    """

    _groups: list[Alike]

    def _start(self, lines: list[Line]) -> None:
        super()._start(lines)
        self._length = 1
        self._parts: list[_Part] = []
        self._width = 0  # slots of the arrays handed out

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """As ``H2OKVCache.update_and_fetch``, for keys [B, H, L, D] of all sequences at once."""
        check_rows(keys, values, None)
        length = keys.shape[2]
        if keys.shape[0] != len(self._lines):
            raise ValueError(
                f"[BatchH2OKVCache.update_and_fetch] keys have shape {keys.shape}, expected B = "
                f"{len(self._lines)} sequences."
            )
        self._settle()
        spans = [line.span(length) for line in self._lines]
        plain = length == 1 and all(span == (0, 1) for span in spans)
        self._groups = grouped(self._groups) if plain else parted(self._groups, spans.__getitem__)
        kept, before = self._before(spans, length)
        self._parts, self._length, self._width = [], length, before + length
        for group in self._groups:
            member = group.members[0]
            start, stop = spans[member]
            if start < stop:
                own = [self._own(rows, group)[:, :, start:stop] for rows in (keys, values)]
                group.cache.update_and_fetch(*own)
            high = before + stop if length > 1 else before + 1
            low = high - kept[member] - (stop - start)
            self._parts.append(_Part(group, start, stop, low, high))
        for line, rows in zip(self._lines, kept, strict=True):
            line.rows = rows
            line.advance(length)
        self._value_shape = values.shape
        self._count()
        return self.keys_and_values()

    def _before(self, spans: list[tuple[int, int]], length: int) -> tuple[list[int], int]:
        """Rows that stay of each sequence, and the slots before the new ones."""
        kept = self._kept([stop - start for start, stop in spans])
        if length > 1:
            return kept, max(kept, default=0)
        # A token that is padding has no slot: the rows of its sequence end where those of others
        # do.
        after = [rows + stop - start for rows, (start, stop) in zip(kept, spans, strict=True)]
        return kept, max([1, *after]) - 1

    def keys_and_values(self) -> tuple[Stored, Stored]:
        """Arrays of all sequences, of which padding is zeros."""
        whole = self._whole()
        keys: Stored
        values: Stored
        if whole is not None:
            keys, values = whole.cache.keys_and_values()
        else:
            rows = [
                None if part.group.store is None else part.group.store.dense()
                for part in self._parts
            ]
            keys, values = (self._handed([one and one[side] for one in rows]) for side in (0, 1))
        handed_out.register(keys, self)
        return keys, values

    def _handed(self, rows: Sequence[mx.array | None]) -> mx.array:
        placed = zip(self._parts, rows, strict=True)
        found = [None if one is None else (part.low, one) for part, one in placed]
        return self._together(found, self._width, 0.0)

    def _whole(self) -> Alike | None:
        """The one group, where it has all sequences in order and no token was padding."""
        if len(self._parts) != 1:
            return None
        (part,) = self._parts
        in_order = part.group.members == list(range(len(self._lines)))
        return part.group if in_order and (part.start, part.stop) == (0, self._length) else None

    def _own(self, array: mx.array, group: Alike) -> mx.array:
        """What concerns a group of an array [B, ...]."""
        if group.members == list(range(array.shape[0])):
            return array
        return array[mx.array(group.members)]

    def _together(
        self, found: Sequence[tuple[int, mx.array] | None], size: int, fill: float
    ) -> mx.array:
        """Arrays of the groups, each from its place on in ``size`` places of the third axis."""
        like = next(one[1] for one in found if one is not None)
        arrays = []
        for group, one in zip(self._groups, found, strict=True):
            shape = [len(group.members), like.shape[1], size, *like.shape[3:]]
            if one is None:
                arrays.append(mx.full(shape, fill, like.dtype))
                continue
            low, array = one
            sides = [low, size - low - array.shape[2]]
            widths = [(0, 0), (0, 0), (sides[0], sides[1]), *[(0, 0)] * (array.ndim - 3)]
            arrays.append(mx.pad(array, widths, constant_values=fill) if any(sides) else array)
        joined = mx.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        members = [member for group in self._groups for member in group.members]
        if members == sorted(members):
            return joined
        return joined[mx.array(sorted(range(len(members)), key=members.__getitem__))]

    # Scores

    @property
    def in_segments(self) -> bool:
        """True: attention reads the rows in parts."""
        return True

    def attend(
        self,
        queries: mx.array,
        keys: Stored,
        values: Stored,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As ``H2OKVCache.attend``; queries that are padding do not count, and give zeros."""
        whole = self._whole()
        if whole is not None:
            return whole.cache.attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        outs: list[tuple[int, mx.array] | None] = []
        for part in self._parts:
            if part.start == part.stop:
                outs.append(None)
                continue
            cache = part.group.cache
            own = self._own(queries, part.group)[:, :, part.start : part.stop]
            rows = cache.keys_and_values()
            shown = self._shown(part, mask, queries)
            outs.append(
                (part.start, cache.attend(own, *rows, scale=scale, mask=shown, sinks=sinks))
            )
        if not any(outs):
            return mx.zeros((*queries.shape[:3], self._value_shape[3]), queries.dtype)
        return self._together(outs, self._length, 0.0)

    def score_chunk(
        self,
        queries: mx.array,
        keys: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> None:
        """As ``H2OKVCache.score_chunk``: the last queries of each sequence count."""
        for part in self._parts:
            if part.start == part.stop:
                continue
            own = self._own(queries, part.group)[:, :, part.start : part.stop]
            rows = self._own(keys, part.group)[:, :, part.low : part.high]
            shown = self._shown(part, mask, queries)
            part.group.cache.score_chunk(own, rows, scale=scale, mask=shown, sinks=sinks)

    def update_scores(
        self, scores: mx.array, *, lse: mx.array | None = None, masked: bool = True
    ) -> None:
        """As ``H2OKVCache.update_scores``; queries that are padding do not count."""
        for part in self._parts:
            if part.start < part.stop:
                queries = slice(part.start, part.stop)
                own = self._own(scores, part.group)[:, :, queries, part.low : part.high]
                sums = None if lse is None else self._own(lse, part.group)[:, :, queries]
                part.group.cache.update_scores(own, lse=sums, masked=masked)

    def _shown(
        self, part: _Part, mask: mx.array | str | None, queries: mx.array
    ) -> mx.array | str | None:
        """What of the mask concerns the tokens and rows of a group."""
        if not isinstance(mask, mx.array):
            return mask
        shape = (queries.shape[0], *mask.shape[-3:-2], self._length, self._width)
        whole = mx.broadcast_to(mask, shape if len(shape) == 4 else (shape[0], 1, *shape[1:]))
        own = self._own(whole, part.group)
        return own[:, :, part.start : part.stop, part.low : part.high]

    def reset_scores(self) -> None:
        """As ``H2OKVCache.reset_scores``."""
        for group in self._groups:
            group.cache.reset_scores()

    @property
    def scores(self) -> mx.array | None:
        """float32 [B, H, N]: what the policy accumulated, NaN for padding and where nothing yet."""
        return self._remembered([group.cache.scores for group in self._groups], float("nan"))

    @property
    def positions(self) -> mx.array | None:
        """int32 [B, H, N]: the place of each row in its sequence, -1 for padding."""
        return self._remembered([group.positions for group in self._groups], PADDING)

    def _remembered(self, found: list[mx.array | None], fill: float) -> mx.array | None:
        if all(one is None for one in found):
            return None
        lengths = [0 if one is None else one.shape[2] for one in found]
        width = max(lengths)
        placed = [None if one is None else (width - one.shape[2], one) for one in found]
        return self._together(placed, width, fill)

    def _settle(self) -> None:
        """Let the surplus of a chunk go."""
        for group in self._groups:
            rows = group.cache.size()
            for member in group.members:
                self._lines[member].rows = rows
