"""A float64 cache that follows DESIGN's order of a step, one row at a time: for whole traces."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import reference
from golden.build import Case


@dataclass
class Head:
    """Rows of one (sequence, KV head): position -> C, NaN while unscored; oldest first."""

    rows: dict[int, float] = field(default_factory=dict)

    def evict(self, count: int, rank: np.ndarray, fields: dict, recent_start: int) -> None:
        positions = list(self.rows)
        order = reference.retention_order(
            rank, positions, sink_size=fields["sink_size"], recent_start=recent_start
        )
        for slot in order[len(order) - count :]:
            del self.rows[positions[slot]]


def keydiff_rank(keys: np.ndarray) -> np.ndarray:
    """Minus the cosine with the mean normalised key: the key most like the others goes first."""
    directions = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
    mean = directions.mean(axis=0)
    return -directions @ (mean / max(np.linalg.norm(mean), 1e-12))


class ReferenceTrace:
    """Runs a trace case; ``positions`` and ``scores`` after each step, as the legs give them."""

    def __init__(self, case: Case) -> None:
        self.fields = case.fields
        self.queries, self.keys, self.values = (
            reference.float64(case.tensors[name]) for name in ("queries", "keys", "values")
        )
        recorded = case.tensors.get("recorded")
        self.recorded = None if recorded is None else reference.float64(recorded)
        self.batch, self.heads = self.keys.shape[:2]
        self.group = self.queries.shape[1] // self.heads
        self.state = {at: Head() for at in np.ndindex(self.batch, self.heads)}
        self.offset = 0

    def run(self) -> dict[str, np.ndarray]:
        for length in self.fields["prefill"]:
            self.feed(length)
        steps = []
        for step in range(self.fields["steps"]):
            self.feed(1, step=step)
            steps.append(self.snapshot())
        positions, scores = (np.stack(column) for column in zip(*steps, strict=True))
        return {"positions": positions, "scores": scores}

    def feed(self, length: int, *, step: int | None = None) -> None:
        budget, recent = self.fields["max_kv_size"], self.fields["recent_size"]
        for at in self.state:
            self._shrink(at, budget, self.offset - recent)
            if length == 1:
                self._shrink(at, budget - 1, self.offset + 1 - recent)
        new = range(self.offset, self.offset + length)
        self.offset += length
        for at, head in self.state.items():
            head.rows |= dict.fromkeys(new, np.nan)
            if self.fields["policy"] == "h2o":
                self._accumulate(at, head, new, step)

    def _shrink(self, at: tuple[int, ...], size: int, recent_start: int) -> None:
        head = self.state[at]
        if len(head.rows) > size:
            rank = rank_of(self.fields["policy"], self.keys[at], head.rows)
            head.evict(len(head.rows) - size, rank, self.fields, recent_start)

    def _accumulate(self, at, head: Head, new: range, step: int | None) -> None:
        positions = np.array(list(head.rows))
        batch, kv_head = at
        of_group = slice(kv_head * self.group, (kv_head + 1) * self.group)
        if step is not None and self.recorded is not None:
            scores = self.recorded[step, batch, of_group][:, None, positions]
        else:
            queries = self.queries[batch, of_group][:, new.start : new.stop]
            scores = self.fields["scale"] * queries @ self.keys[at][positions].T
            scores = np.where(positions > np.array(new)[:, None], -np.inf, scores)
        seen = np.array(list(head.rows.values()))[None, None]
        total = reference.accumulate(seen, scores[None], decay=self.fields["decay"])
        head.rows = dict(zip(positions.tolist(), total[0, 0].tolist(), strict=True))

    def snapshot(self) -> tuple[np.ndarray, np.ndarray]:
        shape = (self.batch, self.heads, self.fields["max_kv_size"])
        positions, scores = np.full(shape, -1, np.int32), np.full(shape, np.nan)
        for at, head in self.state.items():
            for slot, position in enumerate(sorted(head.rows)):
                positions[at][slot], scores[at][slot] = position, head.rows[position]
        return positions, scores


def rank_of(policy: str, keys: np.ndarray, rows: dict[int, float]) -> np.ndarray:
    """What the policy ranks rows by; ``keys`` are those of all positions of the head."""
    positions = np.array(list(rows))
    if policy == "h2o":
        return np.array(list(rows.values()))
    if policy == "keydiff":
        return keydiff_rank(keys[positions])
    assert policy == "window"
    return positions.astype(np.float64)
