"""Rows of several sequences under one budget each: updates, scores, and when padding moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx

from ..config import H2OConfig
from ..stores.choice import empty_store
from ..stores.known_worst import Zones
from ..stores.storage import Storage, Stored
from . import stored_attention
from .batch_masks import new_positions
from .batch_ranks import joined_ranks, sliced_ranks
from .batch_rows import PADDING, Line, Shift, joined, sliced
from .bounded import BoundedRows
from .checks import check_attended, check_rows
from .eviction import Eviction
from .key_ranks import KeyRanks

__all__ = ["BatchedRows"]


class BatchedRows(BoundedRows):
    """Rows of one layer for several sequences, each evicting as it would alone.

    Sequences that hold fewer rows than others have padding on the left, which is never kept where
    a row could be, never recent, and whose queries never score. A full batch writes each new row
    over a slot: padding where the sequence has some, else its worst row. Chunks, and evictions of
    ``evict_every > 1``, gather.

    Attributes:
        offset: int32 [B], tokens seen by each sequence, less the padding that is still to come.
        evicted: rows per head that have gone, summed over the sequences.
    """

    def __init__(
        self, config: H2OConfig | None = None, batch_size: int = 0, *, name: str = ""
    ) -> None:
        super().__init__(config, name=name)
        self._start([Line() for _ in range(batch_size)])

    def _start(self, lines: list[Line]) -> None:
        self._lines = lines
        self._spans: list[tuple[int, int]] = []  # of the last update, while it is to be settled
        self._shift: Shift | None = None
        self._count()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """As ``H2OKVCache.update_and_fetch``, for keys [B, H, L, D] of all sequences at once."""
        check_rows(keys, values, self._store)
        length = keys.shape[2]
        if keys.shape[0] != len(self._lines):
            raise ValueError(
                f"[BatchH2OKVCache.update_and_fetch] keys have shape {keys.shape}, expected B = "
                f"{len(self._lines)} sequences."
            )
        self._check_scored()
        self._settle()
        self._begin()
        if self._store is None:
            self._store = empty_store(self.config, keys, values, self._described())
        spans = [line.span(length) for line in self._lines]
        if self._overwrites(spans, length):
            self._replace(self._store, keys, values)
        else:
            self._append_rows(self._store, keys, values, spans)
        self._length = length
        self._unscored = self.policy.needs_scores
        return self.keys_and_values()

    def _overwrites(self, spans: list[tuple[int, int]], length: int) -> bool:
        full = self._store is not None and self._store.length >= self._limit
        plain = length == 1 and all(span == (0, 1) for span in spans)
        return full and plain and self.config.evict_every == 1

    def _replace(self, store: Storage, keys: mx.array, values: mx.array) -> None:
        """Each new row over padding or the worst row of its sequence.

        One operation knows one position for all: so sequences that are behind the longest are
        moved up to it, but for their sinks, which keeps the order within each.
        """
        clock = max(line.tokens for line in self._lines)
        self._overwrote = True
        eviction = self._eviction_of(store, clock, 1)
        ranks = eviction.ranking()
        behind = [clock - line.tokens for line in self._lines]
        shift = self._shift_of(store, behind)
        known = KeyRanks.offered(self._known(store), store)
        if shift is not None:
            store.positions = store.positions + shift
        store.replace_worst(
            keys,
            values,
            clock,
            sink_size=self.config.sink_size,
            recent_start=eviction.recent_start,
            ranks=ranks,
        )
        if shift is not None:
            padded = min(line.rows for line in self._lines) < store.length
            if padded:  # a row may have come in its place
                shift = self._past_sinks(store, behind)
            store.positions = store.positions - shift
            store.tied = False
            # A row that came over padding may be a sink, which moves no more.
            self._shift = None if padded else Shift(store.positions, behind, shift)
        self._key_ranks = KeyRanks.taken(known, store)
        for line in self._lines:
            line.advance(1)
            line.rows = min(line.rows, store.length)
        self._count()

    def _shift_of(self, store: Storage, behind: list[int]) -> mx.array | None:
        """int32 [B, H, N]: how far each row but the sinks moves; None: no sequence is behind."""
        if not any(behind):
            return None
        known = self._shift
        if known is not None and known.positions is store.positions and known.behind == behind:
            return known.by
        return self._past_sinks(store, behind)

    def _past_sinks(self, store: Storage, behind: list[int]) -> mx.array:
        """int32 [B, H, N]: how far its sequence is behind, for each row but the sinks."""
        column = mx.array(behind, mx.int32)[:, None, None]
        return mx.where(store.positions < self.config.sink_size, 0, column)

    def _append_rows(
        self, store: Storage, keys: mx.array, values: mx.array, spans: list[tuple[int, int]]
    ) -> None:
        length = keys.shape[2]
        added = [stop - start for start, stop in spans]
        kept = self._kept(added)
        if kept != [line.rows for line in self._lines]:
            store = self._rebuilt(store, [store.length] * len(kept), kept, added)
        positions = new_positions([line.tokens for line in self._lines], spans, length, PADDING)
        before, known = store.positions, self._known(store)
        store.append(keys, values, 0, self._limit)
        positions = mx.broadcast_to(positions, (*before.shape[:2], length))
        store.positions = mx.concatenate([before, positions], axis=2)
        self._key_ranks = known and known.appended(store)
        self._store = store
        for line, rows in zip(self._lines, kept, strict=True):
            line.rows = rows
            line.advance(length)
        self._spans = [] if length == 1 and all(added) else spans
        self._count()

    def _kept(self, added: list[int]) -> list[int]:
        return [
            line.kept(count, self.config) for line, count in zip(self._lines, added, strict=True)
        ]

    def _settle(self) -> None:
        """Let padding on the right go to the left, and the surplus of a chunk go altogether."""
        spans, self._spans = self._spans, []
        store = self._store
        if not spans or store is None:
            return
        budget = self.config.max_kv_size
        before = store.length - self._length
        ends = [before + stop for _, stop in spans]
        kept = [
            min(line.rows, budget) if stop - start > 1 else line.rows
            for line, (start, stop) in zip(self._lines, spans, strict=True)
        ]
        longest = max((line.rows for line in self._lines), default=0)
        nowhere = all(start == 0 and stop == self._length for start, stop in spans)
        if nowhere and longest == store.length == max(kept):
            return
        if kept != [line.rows for line in self._lines]:
            self._spans = spans  # stays due where the next line raises
            self._check_scored()
            self._spans = []
        self._store = self._rebuilt(store, ends, kept, [0] * len(kept))
        for line, rows in zip(self._lines, kept, strict=True):
            line.rows = rows
        self._count()

    def _rebuilt(
        self, store: Storage, ends: list[int], kept: list[int], added: list[int]
    ) -> Storage:
        """The rows that end at the slots ``ends``, cut down to ``kept``, behind new padding."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for place, line in enumerate(self._lines):
            key = (ends[place], line.rows, kept[place], line.tokens, added[place])
            alike.setdefault(key, []).append(place)
        parts, ranks = [], []
        whole = None if store.in_segments else self._known(store)
        for (end, rows, keep, tokens, new), members in alike.items():
            part = sliced(store, self.config, members, end - rows, end)
            known = whole and sliced_ranks(whole, part, members, end - rows, end)
            if keep < rows:
                eviction = self._eviction_of(part, tokens, new)
                known = KeyRanks.through_compaction(known, eviction, keep)
            parts.append((members, part))
            ranks.append(known)
        result = joined(parts, self.config)
        self._key_ranks = joined_ranks(parts, ranks, result)
        return result

    def _eviction_of(self, store: Storage, offset: int, added: int) -> Eviction:
        return self._eviction(store, added)._replace(offset=offset)

    def _count(self) -> None:
        lines = self._lines
        places = mx.array([line.tokens - line.before for line in lines], mx.int32)
        self.offset = places  # type: ignore[assignment]
        self.evicted = sum(line.tokens - line.rows for line in lines)

    # Scores

    def _next_zones(self, store: Storage) -> Zones | None:
        """None where the zones of the sequences differ."""
        clock, *others = {line.tokens for line in self._lines}
        zones = super()._next_zones(store) if not others else None
        recent_size = cast(int, self.config.recent_size)
        return zones and zones._replace(recent_start=clock + 1 - recent_size)

    def _evicts_next(self, store: Storage) -> bool:
        """Not while padding of the last update still has keys."""
        return self._regular() and super()._evicts_next(store)

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
        """As ``H2OKVCache.attend``; queries that are padding do not count."""
        if self._regular():
            return super().attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        check_attended(keys, self._store)
        store = cast(Storage, self._store)
        out, scores, lse = stored_attention.attention_with_scores(
            store, queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

        def take_in(one: BoundedRows, place: int, own: slice, slots: slice) -> None:
            some = slice(place, place + 1)
            one.update_scores(
                scores[some, :, own, slots], lse=None if lse is None else lse[some, :, own]
            )

        self._of_each(store, take_in)
        tied: mx.array = mx.depends(out, [store.importance])
        return tied

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
        if self._regular():
            super().score_chunk(queries, keys, scale=scale, mask=mask, sinks=sinks)
            return
        check_attended(keys, self._store)

        def take_in(one: BoundedRows, place: int, own: slice, slots: slice) -> None:
            some = slice(place, place + 1)
            part = mask
            if isinstance(mask, mx.array):
                shape = (queries.shape[0], *mask.shape[-3:-2], queries.shape[2], keys.shape[2])
                part = mx.broadcast_to(mask, shape)[some, :, own, slots]
            one.score_chunk(
                queries[some, :, own], keys[some, :, slots], scale=scale, mask=part, sinks=sinks
            )

        self._of_each(cast(Storage, self._store), take_in)

    def _regular(self) -> bool:
        return all(span == (0, self._length) for span in self._spans)

    def _of_each(
        self, store: Storage, take_in: Callable[[BoundedRows, int, slice, slice], None]
    ) -> None:
        """Let each sequence by itself take in what concerns its own queries and slots."""
        before = store.length - self._length
        parts = []
        for place, (line, (start, stop)) in enumerate(zip(self._lines, self._spans, strict=True)):
            end = before + stop
            some = slice(place, place + 1)
            importance = store.importance[some]
            if stop > start:
                one = BoundedRows(self.config, name=self.name)
                one._store = sliced(store, self.config, [place], end - line.rows, end)
                take_in(one, place, slice(start, stop), slice(end - line.rows, end))
                sides = (importance[:, :, : end - line.rows], importance[:, :, end:])
                scored = one._store.importance
                importance = mx.concatenate([sides[0], scored, sides[1]], axis=2)
            parts.append(importance)
        store.importance = mx.concatenate(parts)
        self._unscored = False
