"""The slow reference of the cache: lists of rows per head, literally as docs/cache.md says.

It shares no code with the package. Rows stay in the order of their positions, a query sees every
row whose position is not beyond its own, and everything is float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import reference


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
        for head, rows in self.heads.items():
            if self.surplus:
                self.evict(rows, config.max_kv_size, self.offset - config.recent_size)
            recent_start = self.offset + added - config.recent_size
            if added > 1:
                self.evict(rows, config.max_kv_size, recent_start)
            elif len(rows) >= config.max_kv_size + config.evict_every - 1:
                self.evict(rows, config.max_kv_size - 1, recent_start)
            rows += [Row(self.offset + i, keys[head][i], values[head][i]) for i in range(added)]
        self.offset += added
        self.surplus = added > 1 and len(rows) > config.max_kv_size

    def settle(self) -> None:
        """What reading the size of a cache does."""
        if self.surplus:
            for rows in self.heads.values():
                self.evict(rows, self.config.max_kv_size, self.offset - self.config.recent_size)
            self.surplus = False

    def evict(self, rows: list[Row], keep: int, recent_start: int) -> None:
        if len(rows) <= keep:
            return
        order = reference.retention_order(
            self.ranks(rows),
            [row.position for row in rows],
            sink_size=self.config.sink_size,
            recent_start=recent_start,
        )
        kept = sorted(order[:keep])
        rows[:] = [rows[slot] for slot in kept]

    def ranks(self, rows: list[Row]) -> list[float]:
        if self.config.policy == "h2o":
            return [row.score for row in rows]
        if self.config.policy == "window":
            return [row.position for row in rows]
        assert self.config.policy == "keydiff"
        directions = [row.key / max(np.linalg.norm(row.key), 1e-12) for row in rows]
        mean = np.mean(directions, axis=0)
        mean = mean / max(np.linalg.norm(mean), 1e-12)
        return [-float(direction @ mean) for direction in directions]

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
        if self.config.policy != "h2o":
            return
        before = np.array([[[row.score for row in rows]]])
        after = reference.accumulate(before, scores, decay=self.config.decay)
        for row, score in zip(rows, after[0, 0], strict=True):
            row.score = float(score)

    def positions(self) -> dict[tuple[int, ...], list[int]]:
        """The positions kept, ascending, of each (sequence, KV head)."""
        return {head: [row.position for row in rows] for head, rows in self.heads.items()}

    def scores(self) -> dict[tuple[int, ...], list[float]]:
        """C of each row, in the order of ``positions``."""
        return {head: [row.score for row in rows] for head, rows in self.heads.items()}
