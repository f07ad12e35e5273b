"""The slow reference of the cache: one sequence, lists of rows per head, as docs/python.md says.

It shares no code with the package. Rows stay in the order of their positions, a query sees every
row whose position is not beyond its own, and everything is float64.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

import reference
import reference_folding
import reference_ranks
from cache_columns import packings, rounded


@dataclass
class Row:
    """One stored row of one head; ``score`` is C, NaN before the first score.

    With folding, it stands for ``count`` rows, and has been changed ``fresh`` times since it was
    last compared. A row that ``leaves`` is evicted first, and not folded.
    """

    position: int
    key: np.ndarray
    value: np.ndarray
    score: float = np.nan
    count: int = 1
    fresh: int = 0
    leaves: bool = False


@dataclass
class Seen:
    """The scores of one update's queries in one head: [group, L, N], for rows at ``positions``."""

    start: int
    positions: list[int]
    values: np.ndarray


class ReferenceCache:
    """Takes NumPy arrays: keys [H, L, D], values [H, L, Dv]; settings as of H2OConfig."""

    def __init__(self, config, heads: int) -> None:
        self.config = config
        self.heads: list[list[Row]] = [[] for _ in range(heads)]
        self.held: list[list[Seen]] = [[] for _ in range(heads)]  # of queries that may be trimmed
        self.offset = self.evicted = self.committed = self.certain = 0
        self.surplus = False
        # Newest rows that a trim may take back at any time.
        self.tail = config.speculative + 1 if config.speculative else 0
        self.plan(0)
        self.close = False  # whether folds chose between rows as near as float32 can tell
        self.centres = [None, None]  # [H, 1, D] of keys and of values, if rows have a frame

    @property
    def size(self) -> int:
        return len(self.heads[0])

    def plan(self, end: int) -> None:
        """Set the budget of a text of this length, and how many newest rows it protects."""
        steps, most = self.config.rows_at, self.config.max_kv_size
        self.budget = next((rows for tokens, rows in steps if tokens >= end), most)
        free = self.budget - max(self.config.budget.sink_size, self.config.prefix_size)
        self.recent = max(min(self.config.recent_size * self.budget // most, free), self.tail)

    def update(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Evict what is due, then append the new rows."""
        self.make_room(keys.shape[1])
        places = range(self.offset, self.offset + keys.shape[1])
        for head, rows in enumerate(self.heads):
            rows += map(Row, places, keys[head], values[head])
        self.offset = places.stop
        self.surplus = self.size > self.budget

    def make_room(self, added: int) -> None:
        """Evict what is due before ``added`` rows are appended. Idempotent."""
        self.plan(self.offset + added)
        self.surplus = self.size > self.budget
        self.flush()
        self.commit(self.offset + added - self.tail)
        excess = self.size + added - self.budget
        if (added == 1 or added <= self.tail) and excess > 0:
            group = min(self.config.budget.evict_every, self.config.budget.heavy_size + 1)
            free = self.size - reference_folding.for_good(self.config)
            free -= max(0, self.recent - added)
            self.evict(max(excess, min(group, free)), self.offset + added)

    def flush(self) -> None:
        """Evict the surplus of a chunk."""
        if self.surplus:
            self.commit(self.offset - self.tail)
            self.evict(self.size - self.budget, self.offset)
        self.surplus = False

    def take_policy(self, config, scored: bool) -> None:
        """Rank the same rows by another policy, which continues with their scores, if any."""
        self.config, self.held = config, [[] for _ in self.heads]
        for row in (row for rows in self.heads for row in rows if not scored):
            row.score = np.nan

    def evict(self, count: int, end: int) -> None:
        """Evict ``count`` rows of each head; the newest before ``end`` are protected."""
        recent_start = end - self.recent
        self.certain = max(self.certain, end - self.tail)  # no trim reaches behind it
        context = self.config.context_size
        for row in (row for rows in self.heads for row in rows if context):
            row.leaves = row.position < end - context
        # A prefix is left out if rows are in order.
        prefix = 0 if self.config.light_bits else self.config.prefix_size
        ranked = [
            [row for row in rows if prefix <= row.position < self.certain] for rows in self.heads
        ]
        self.evicted += count
        times = recent_start, self.offset
        ranks = [
            reference_ranks.ranks(self.config, head, rows, len(rows) - count, *times)
            for head, rows in enumerate(ranked)
        ]
        for head, rows in enumerate(self.heads):
            by_position = {
                row.position: np.nan if row.leaves else rank
                for row, rank in zip(ranked[head], ranks[head], strict=True)
            }
            order = reference.retention_order(
                [by_position.get(row.position, np.nan) for row in rows],
                [row.position for row in rows],
                sink_size=reference_folding.for_good(self.config),
                recent_start=recent_start,
            )
            stay = sorted(order[: len(rows) - count])
            if self.config.folds:
                some = ranked[head]
                there = {id(rows[slot]) for slot in stay}
                self.close |= reference_folding.fold(
                    some, np.array([by_position[row.position] for row in some]),
                    [place for place, row in enumerate(some) if id(row) in there],
                    self.config, recent_start, partial(self.store, head),
                )  # fmt: skip
            rows[:] = [rows[slot] for slot in stay]

    def store(self, head: int, key: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
        """A changed row, in the form that the cache stores."""
        made = (row.astype(np.float32)[None] for row in (key, value))
        found = []
        for row, width, centres in zip(made, packings(self.config), self.centres, strict=True):
            centre = None if centres is None else centres[head]
            found.append(rounded(row, width, centre)[0])
        return found

    def trim(self, count: int) -> None:
        """Remove the last tokens, and the scores of their queries that are not accumulated yet."""
        if self.offset - count < self.committed and (self.evicted or self.surplus):
            raise ValueError(f"{count} tokens reach behind {self.committed}")
        self.offset -= count
        for head, rows in enumerate(self.heads):
            rows[:] = [row for row in rows if row.position < self.offset]
            for seen in self.held[head]:
                seen.values = seen.values[:, : max(0, self.offset - seen.start)]
        self.committed = min(self.committed, self.offset)
        self.surplus = self.size > self.budget

    def commit(self, border: int) -> None:
        """Accumulate scores of queries before ``border``, for rows that the last of them saw."""
        self.committed = max(self.committed, border)
        for head, waiting in enumerate(self.held):
            for seen in waiting:
                ready = seen.values[:, : max(0, border - seen.start)]
                if ready.shape[1] == 0:
                    continue
                seen.values = seen.values[:, ready.shape[1] :]
                seen.start += ready.shape[1]
                there = {row.position: row for row in self.heads[head]}
                before = [there[p].score if p in there else np.nan for p in seen.positions]
                after = reference_ranks.take_in(self.config, np.array(before), ready)
                for position, score in zip(seen.positions, after, strict=True):
                    if position in there and position < seen.start:
                        there[position].score = float(score)
            waiting[:] = [seen for seen in waiting if seen.values.shape[1]]

    def attend(self, queries: np.ndarray, scale: float, *came: np.ndarray) -> np.ndarray:
        """Attention of the last L tokens [Hq, L, D], over the rows that ``came``; keeps scores."""
        group, length = len(queries) // len(self.heads), queries.shape[1]
        outs = []
        for head, rows in enumerate(self.heads):
            positions = np.array([row.position for row in rows])
            seen = positions[None] <= np.arange(self.offset - length, self.offset)[:, None]
            if self.config.folds:  # a row that stands for n counts n times
                logs = np.log([row.count for row in rows])
                seen = np.where(seen, logs, -np.inf).astype(np.float32)
            read = [np.array([getattr(row, side) for row in rows]) for side in ("key", "value")]
            for side, new in zip(read, came, strict=False):
                side[-length:] = new[head]
            found = reference.attention(
                queries[None, head * group : (head + 1) * group],
                *(side[None, None] for side in read),
                scale=scale,
                mask=seen,
            )
            outs.append(found.out[0])
            self.hold(head, found.scores[0])
        self.commit(self.offset - self.tail)
        return np.concatenate(outs)

    def absorb(self, scores: np.ndarray) -> None:
        """Accumulate scores [Hq, L, T] for all positions of the sequence, in order."""
        group = len(scores) // len(self.heads)
        for head, rows in enumerate(self.heads):
            positions = [row.position for row in rows]
            self.hold(head, scores[head * group : (head + 1) * group][..., positions])
        self.commit(self.offset - self.tail)

    def hold(self, head: int, scores: np.ndarray) -> None:
        positions = [row.position for row in self.heads[head]]
        seen = reference_ranks.seen(self.config, scores)
        self.held[head].append(Seen(self.offset - scores.shape[1], positions, seen))

    def positions(self) -> list[list[int]]:
        """The positions kept, ascending, of each KV head."""
        return [[row.position for row in rows] for rows in self.heads]

    def scores(self) -> list[list[float]]:
        """C of each row, in order of ``positions``."""
        return [[row.score for row in rows] for rows in self.heads]
