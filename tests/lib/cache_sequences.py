"""A sequence of random tokens for a cache and for the slow reference."""

import numpy as np

import reference_frame
from cache_columns import SIZE
from mlx_h2o import H2OConfig
from reference_cache import ReferenceCache

HEADS, GROUP = 2, 2


class Sequence:
    """A sequence of random tokens, and its reference."""

    def __init__(self, config: H2OConfig, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.accepted = self.random(420)
        self.came = [array.copy() for array in self.accepted[1:]]  # drafts too, while they last
        self.reference = ReferenceCache(config, HEADS)
        self.framed = config.framed
        self.packed = 0  # first rows that are packed, however new
        self.centres: list[np.ndarray | None] = [None, None]

    def random(self, count: int) -> list[np.ndarray]:
        """Queries, keys and values [heads, count, SIZE] of tokens that are not accepted yet."""
        heads = HEADS * GROUP, HEADS, HEADS
        return [self.rng.standard_normal((h, count, SIZE)).astype(np.float32) for h in heads]

    def goes_on_differently(self, number: int) -> None:
        """Continue with other random tokens than before."""
        self.rng = np.random.default_rng([number, self.reference.offset])
        for rows, new in zip(self.accepted, self.random(420), strict=True):
            rows[:, self.reference.offset :] = new[:, self.reference.offset :]

    def next(self, count: int, drafts: int = 0) -> list[np.ndarray]:
        """The next tokens of the sequence, followed by drafts that differ from it."""
        start = self.reference.offset
        parts = zip(self.accepted, self.random(drafts), strict=True)
        return [np.concatenate([a[:, start : start + count], d], axis=1) for a, d in parts]

    def takes(self, rows: list[np.ndarray]) -> None:
        """Remember the keys and values that come next, after the evictions that they make due."""
        start, added = self.reference.offset, rows[0].shape[1]
        if added:
            self.reference.make_room(added)
        for came, new in zip(self.came, rows, strict=True):
            came[:, start : start + new.shape[1]] = new
        if self.framed and self.reference.size == 0 and added:  # it starts, or starts again
            self.centres = reference_frame.centres(*rows)
        self.reference.centres = self.centres
