"""The evicting cache of several sequences, as mlx_lm's continuous batching asks for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, cast

import mlx.core as mx

from ..config import H2OConfig
from . import formats, tiers
from .batch_masks import mask_of
from .cache import H2OKVCache
from .quantized import evicting_cache
from .scored import IMPORTANCE
from .table import Segment, Table

__all__ = ["BatchH2OKVCache"]

_STATE = ("keys", "values", "scores", "positions", "unscored", "name", "lines", "settings")


class BatchH2OKVCache(H2OKVCache):
    """Several sequences of one layer, each of which evicts as it would alone.

    ``H2OKVCache.merge`` makes one, ``extract`` gives a sequence back. The rows of a sequence fill
    the first slots; unused slots behind them, and padding among the tokens that come, are masked,
    never kept where a row could be, and their queries never score.

    Attributes:
        offset: int32 [B], tokens seen by each sequence, less the padding that is still to come.
        evicted: rows per head that have gone, summed over the sequences.
    """

    def __init__(
        self, config: H2OConfig | None = None, batch_size: int = 0, *, name: str = ""
    ) -> None:
        self._configure(config if config is not None else H2OConfig(), name)
        self._start([0] * batch_size)

    def _configure(self, config: H2OConfig, name: str) -> None:
        # Dense rows or packed ones: what they are is the columns' affair.
        self._quantized = config.kv_bits is not None  # type: ignore[misc]
        super()._configure(config, name)

    def _start(self, tokens: list[int], table: Table | None = None) -> None:
        super()._start(tokens, table)
        self._left = [0] * len(tokens)  # tokens of padding that are still to come
        self._own: list[int | None] = [None] * len(tokens)  # own tokens before padding comes
        self._count()

    def _count(self) -> None:
        places = [seen - left for seen, left in zip(self._tokens, self._left, strict=True)]
        self._offset = mx.array(places, mx.int32)

    @property
    def offset(self) -> Any:
        """int32 [B]: tokens seen by each sequence, less the padding that is still to come."""
        return self._offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """As ``H2OKVCache.update_and_fetch``, for keys [B, H, L, D] of all sequences at once."""
        if keys.ndim == 4 and keys.shape[0] != len(self._tokens):
            raise ValueError(
                f"[BatchH2OKVCache.update_and_fetch] keys have shape {keys.shape}, expected B = "
                f"{len(self._tokens)} sequences."
            )
        return super().update_and_fetch(keys, values)

    def _own_spans(self, added: int) -> list[tuple[int, int]]:
        spans = self._next_spans(added)
        self._left = [left - start for left, (start, _) in zip(self._left, spans, strict=True)]
        self._own = [
            None if own is None else own - (stop - start)
            for own, (start, stop) in zip(self._own, spans, strict=True)
        ]
        return [] if all(span == (0, added) for span in spans) else spans

    def _next_spans(self, added: int) -> list[tuple[int, int]]:
        """Which of the next tokens are each sequence's own: from, and up to."""
        spans = []
        for left, own in zip(self._left, self._own, strict=True):
            start = min(left, added)
            spans.append((start, min(added, start + (added if own is None else own))))
        return spans

    def _advance_one(self) -> None:
        self._advance([1] * len(self._tokens))

    def _advance(self, counts: Sequence[int]) -> None:
        super()._advance(counts)
        self._count()

    # Padding

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce padding among the tokens to come, before the model is called.

        Args:
            left_padding: tokens of padding that come first, for each sequence; only while the
                batch is empty.
            lengths: tokens of its own that each sequence is given before ``finalize``; what comes
                then is padding.
            right_padding: how much that is; needs ``lengths``.

        Raises:
            ValueError: numbers other than one per sequence, or padding at a wrong moment.
        """
        op = "[BatchH2OKVCache.prepare]"
        given = {"left_padding": left_padding, "lengths": lengths, "right_padding": right_padding}
        for name, numbers in given.items():
            if numbers is None:
                continue
            if len(numbers) != len(self._tokens) or min(numbers, default=0) < 0:
                raise ValueError(
                    f"{op} {name} is {list(numbers)}, expected {len(self._tokens)} numbers of at "
                    "least 0, one per sequence."
                )
        if left_padding is not None and not self.empty():
            raise ValueError(f"{op} left_padding is given, expected it before the first tokens.")
        if right_padding is not None and max(right_padding, default=0) > 0 and lengths is None:
            raise ValueError(f"{op} right_padding is given without lengths, expected both.")
        self._free = 0
        if left_padding is not None:
            self._left = [a + int(b) for a, b in zip(self._left, left_padding, strict=True)]
        if lengths is not None:
            self._own = [int(count) for count in lengths]
        self._count()

    def finalize(self) -> None:
        """End what ``prepare`` announced on the right."""
        self._own = [None] * len(self._tokens)

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask for the next ``length`` tokens: as of ``H2OKVCache``, without what is unused.

        bool [B, 1, length, slots] where sequences differ or any has padding.
        """
        if window_size is not None:
            return super().make_mask(length, window_size, return_array)
        spans = self._next_spans(length)
        table = self._table
        rows = [[0] for _ in spans] if table is None else self._planned(table, spans)
        return mask_of(rows, spans, length, return_array=return_array)

    def _planned(self, table: Table, spans: Sequence[tuple[int, int]]) -> list[list[int]]:
        """For each sequence its rows in every segment, as they will be when the tokens come."""
        config, planned = self.config, []
        for line, (start, stop) in enumerate(spans):
            own = [one.rows[line] for one in table.segments]
            rows, added = sum(own), stop - start
            if self._surplus and rows > self._budget:
                own = self._after(own, self._budget, 0)
            own = self._after(own, self._kept(sum(own), added), added)
            if self._mixed and own[-1] >= self._tail_limit:
                own = tiers.planned(config, sum(own), own[-1], self._recent(added))
            planned.append(own)
        return planned

    def _after(self, rows: list[int], kept: int, added: int) -> list[int]:
        """Rows in every segment after an eviction before ``added`` tokens, if it is one."""
        if kept == sum(rows):
            return rows
        if not self._mixed:
            return [kept]
        protected = self._recent(added)
        return tiers.planned(self.config, kept, min(rows[-1], protected), protected)

    def _recent(self, added: int) -> int:
        """Stored rows that are protected as recent when so many more come."""
        return max(0, cast(int, self.config.recent_size) - added)

    @property
    def _padded(self) -> bool:
        return any(self._left) or any(own is not None for own in self._own)

    def _room_for_one(self, table: Table) -> int:
        return 0 if self._padded else super()._room_for_one(table)

    # Sequences that join and leave

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchH2OKVCache:
        """The sequences of caches of one sequence each, settings and evictions included.

        Raises:
            ValueError: no caches, settings that differ, caches of another class or of batches.
        """
        _check_mergeable(caches)
        first = caches[0]
        batch = cls(first.config, len(caches), name=first.name)
        for cache in caches:
            cache.flush()
        tables = [None if one._table is None else one._table.copy() for one in caches]
        batch._join(tables, [one._tokens for one in caches])
        batch._unscored = any(one._unscored for one in caches)
        return batch

    def extend(self, other: BatchH2OKVCache) -> None:
        """Add the sequences of another batch behind these.

        Raises ValueError for a cache of another kind or with other settings.
        """
        op = "[BatchH2OKVCache.extend]"
        if not isinstance(other, BatchH2OKVCache):
            raise ValueError(f"{op} found a {type(other).__name__}, expected a BatchH2OKVCache.")
        if other.config != self.config:
            raise ValueError(f"{op} {_differing((self.config, other.config))}")
        self.flush()
        other.flush()
        unscored = self._unscored or other._unscored
        theirs = None if other._table is None else other._table.copy()
        left, own = [*self._left, *other._left], [*self._own, *other._own]
        self._join([self._table, theirs], [self._tokens, other._tokens])
        self._unscored, self._left, self._own = unscored, left, own
        self._count()

    def _join(self, tables: Sequence[Table | None], tokens: Sequence[list[int]]) -> None:
        """Become the sequences of all these tables; None has no rows."""
        like = next((table for table in tables if table is not None), None)
        joined = None
        if like is not None:
            filled = [
                _none_like(like, len(lines)) if table is None else table
                for table, lines in zip(tables, tokens, strict=True)
                if lines
            ]
            joined = Table.join(filled, [lines for lines in tokens if lines])
        self._start([seen for lines in tokens for seen in lines], joined)

    def extract(self, index: int) -> H2OKVCache:
        """The cache of one sequence, in arrays of its own.

        Raises ValueError where there is no such sequence.
        """
        if not 0 <= index < len(self._tokens):
            raise ValueError(
                f"[BatchH2OKVCache.extract] index is {index}, expected 0 to "
                f"{len(self._tokens) - 1}, one of the sequences."
            )
        self.flush()
        cache = evicting_cache(self.config, name=self.name)
        if self._table is not None and self._tokens[index]:
            table = self._table.select([index], self._tokens)
            cache._start([self._tokens[index]], table)
            cache._unscored = self._unscored
        return cache

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only some sequences, in the order given; none is allowed."""
        found: Any = (
            batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        )
        keep = [int(index) for index in found]
        wrong = [index for index in keep if not 0 <= index < len(self._tokens)]
        if wrong:
            raise ValueError(
                f"[BatchH2OKVCache.filter] found the indices {wrong}, expected 0 to "
                f"{len(self._tokens) - 1}."
            )
        self.flush()
        left, own, unscored = self._left, self._own, self._unscored
        tokens = [self._tokens[index] for index in keep]
        table = self._table if any(tokens) else None
        self._release()
        self._start(tokens, table and table.select(keep, self._tokens))
        self._left, self._own = [left[index] for index in keep], [own[index] for index in keep]
        self._unscored = unscored
        self._count()

    # State and copies

    def _copy_to(self, copy: H2OKVCache) -> None:
        super()._copy_to(copy)
        assert isinstance(copy, BatchH2OKVCache)
        copy._left, copy._own = list(self._left), list(self._own)
        copy._count()

    @property
    def state(self) -> tuple[Any, ...]:
        """keys, values, scores, positions, unscored, name, lines, settings; the last two JSON."""
        table = self._table
        rows: tuple[Any, ...] = (None,) * 4
        if table is not None:
            rows = (*formats.stored(table), self.scores, self.positions)
        lines = {
            "tokens": self._tokens,
            "rows": [] if table is None else [one.rows for one in table.segments],
            "before": self._left,
            "remaining": self._own,
        }
        settings = json.dumps(asdict(self.config))
        return (*rows, self._unscored, self.name, json.dumps(lines), settings)

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        if len(state) != len(_STATE):
            raise ValueError(
                f"[BatchH2OKVCache.state] found {len(state)} parts, expected {len(_STATE)}: "
                f"{', '.join(_STATE)}."
            )
        keys, values, importance, positions, unscored, name, lines, settings = state
        self._configure(H2OConfig(**json.loads(settings)), name)
        found = json.loads(lines)
        if isinstance(found, list):
            raise ValueError(
                "[BatchH2OKVCache.state] found a batch of an earlier version, expected one of "
                "this version: extract its sequences there."
            )
        table = None
        if importance is not None:
            table = formats.restored_table(self.config, keys, values, found["rows"])
            table.place(positions)
            if self.policy.needs_scores:
                table.attach(IMPORTANCE, importance, float("nan"))
        self._start(list(found["tokens"]), table)
        self._left, self._own = list(found["before"]), list(found["remaining"])
        self._unscored = bool(unscored)
        self._count()


H2OKVCache._batch = BatchH2OKVCache


def _none_like(table: Table, lines: int) -> Table:
    """Lines without rows, kept as those of a table."""

    def none(part: mx.array) -> mx.array:
        return mx.zeros((lines, part.shape[1], 0, *part.shape[3:]), part.dtype)

    found = Table(
        [Segment(one.keys.each(none), one.values.each(none), [0] * lines) for one in table.segments]
    )
    found.fills = dict(table.fills)
    found.beside = {name: none(array) for name, array in table.beside.items()}
    return found


def _check_mergeable(caches: Sequence[Any]) -> None:
    op = "[BatchH2OKVCache.merge]"
    if not caches:
        raise ValueError(f"{op} found no caches, expected at least one.")
    for cache in caches:
        if not isinstance(cache, H2OKVCache):
            raise ValueError(f"{op} found a {type(cache).__name__}, expected H2OKVCache only.")
        if cache.config.speculative:
            raise ValueError(
                f"{op} speculative is {cache.config.speculative}, expected 0: there is no "
                "speculative decoding of batches."
            )
        held = 1 if cache._table is None else cache._table.shape[0]
        if held != 1:
            raise ValueError(f"{op} found a cache of {held} sequences, expected one.")
    if any(cache.unequal_budgets for cache in caches):
        raise ValueError(
            f"{op} found layers with unequal budgets, expected one budget: a batch has one "
            "mask for all layers."
        )
    if any(cache.config != caches[0].config for cache in caches):
        raise ValueError(f"{op} {_differing(cache.config for cache in caches)}")


def _differing(configs: Iterable[H2OConfig]) -> str:
    """What is wrong with settings that are not the same."""
    first, *others = dict.fromkeys(configs)
    return (
        f"found the settings {others[0]} beside {first}, expected the same: a batch has one budget "
        "and one policy."
    )
