"""The slow reference of the cache: lists of rows per head, literally as docs/cache.md says.

It shares no code with the package. Rows stay in the order of their positions, a query sees every
row whose position is not beyond its own, and everything is float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import reference
import reference_ranks


@dataclass
class Row:
    """One stored row of one head; ``score`` is C, NaN before the first unmasked score."""

    position: int
    key: np.ndarray
    value: np.ndarray
    score: float = np.nan


class ReferenceCache:
    """Takes NumPy arrays: keys [B, H, L, D], values [B, H, L, Dv]; settings as of H2OConfig."""

    def __init__(self, config, batch: int, heads: int) -> None:
        self.config = config
        self.heads = {head: [] for head in np.ndindex(batch, heads)}
        self.offset = 0
        self.surplus = False

    def update(self, keys: np.ndarray, values: np.ndarray) -> None:
        config, added = self.config, keys.shape[2]
        self.settle()
        recent_start = self.offset + added - config.recent_size
        if added > 1:
            self.evict(config.max_kv_size, recent_start)
        elif self.length() >= config.max_kv_size + config.evict_every - 1:
            self.evict(config.max_kv_size - 1, recent_start)
        for head, rows in self.heads.items():
            rows += [Row(self.offset + i, keys[head][i], values[head][i]) for i in range(added)]
        self.offset += added
        self.surplus = added > 1 and self.length() > config.max_kv_size

    def length(self) -> int:
        return len(next(iter(self.heads.values())))

    def settle(self) -> None:
        """What reading the size of a cache does."""
        if self.surplus:
            self.evict(self.config.max_kv_size, self.offset - self.config.recent_size)
        self.surplus = False

    def evict(self, keep: int, recent_start: int) -> None:
        if self.length() <= keep:
            return
        ranks = {
            head: reference_ranks.ranks(self.config, head[1], rows) for head, rows in self.items
        }
        if self.config.shared_heads:
            batch = {head[0] for head in ranks}
            means = {b: np.mean([r for head, r in ranks.items() if head[0] == b], 0) for b in batch}
            ranks = {head: means[head[0]] for head in ranks}
        for head, rows in self.items:
            order = reference.retention_order(
                ranks[head],
                [row.position for row in rows],
                sink_size=self.config.sink_size,
                recent_start=recent_start,
            )
            rows[:] = [rows[slot] for slot in sorted(order[:keep])]

    @property
    def items(self) -> list:
        return list(self.heads.items())

    def attend(self, queries: np.ndarray, scale: float) -> np.ndarray:
        """Attention of the last L tokens [B, Hq, L, D], and the scores taken in."""
        batch, query_heads, length, _ = queries.shape
        out = {}
        for (b, h), rows in self.heads.items():
            group = query_heads // (len(self.heads) // batch)
            of_group = slice(h * group, (h + 1) * group)
            positions = np.array([row.position for row in rows])
            asking = np.arange(self.offset - length, self.offset)
            found = reference.attention(
                queries[b : b + 1, of_group],
                np.array([[[row.key for row in rows]]]),
                np.array([[[row.value for row in rows]]]),
                scale=scale,
                mask=positions[None] <= asking[:, None],
            )
            out[b, h] = found.out[0]
            self.absorb_head(rows, found.scores)
        heads = len(self.heads) // batch
        return np.stack([np.concatenate([out[b, h] for h in range(heads)]) for b in range(batch)])

    def absorb(self, scores: np.ndarray) -> None:
        """Take in scores [B, Hq, L, T] given by position, for all positions of the sequence."""
        group = scores.shape[1] // (len(self.heads) // scores.shape[0])
        for (b, h), rows in self.heads.items():
            positions = [row.position for row in rows]
            self.absorb_head(rows, scores[b : b + 1, h * group : (h + 1) * group, :, positions])

    def absorb_head(self, rows: list[Row], scores: np.ndarray) -> None:
        before = np.array([row.score for row in rows])
        after = reference_ranks.accumulate(self.config, before, scores[0])
        for row, score in zip(rows, after, strict=True):
            row.score = float(score)

    def positions(self) -> dict[tuple[int, ...], list[int]]:
        """The positions kept, ascending, of each (sequence, KV head)."""
        return {head: [row.position for row in rows] for head, rows in self.heads.items()}

    def scores(self) -> dict[tuple[int, ...], list[float]]:
        """C of each row, in the order of ``positions``."""
        return {head: [row.score for row in rows] for head, rows in self.heads.items()}
