"""What a policy is: it may accumulate scores, and it ranks rows. It stores and decides nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import mlx.core as mx

from ..operations.composed.accumulating import MAX_QUERIES
from ..operations.requests import PerSequence


@dataclass
class Rows:
    """The stored rows of one layer, as a policy sees them; slots are in no particular order.

    Attributes:
        keys: [B, H, N, D], the model's dtype, with RoPE applied.
        values: [B, H, N, Dv].
        importance: float32 [B, H, N], what ``accumulate`` made; NaN where not yet scored.
        positions: int32 [B, H, N], the place of each row in the sequence.
        offset: tokens that the cache has seen, which is the position of the next row.
        keep: rows of each head that stay.
        places: of these, those that no range protects: what ranks decide about.
        sink_size: the first positions, whose rows stay.
        recent_start: the first position of the newest rows, which stay too.
    """

    keys: mx.array
    values: mx.array
    importance: mx.array
    positions: mx.array
    offset: int
    keep: int = 0
    places: int = 0
    sink_size: int = 0
    recent_start: PerSequence | None = None


@dataclass(frozen=True)
class Policy(ABC):
    """Ranks stored rows; the cache evicts the lowest ranked that no window protects.

    Policies hold settings only, no state, and are equal where these are: what is remembered of a
    row lives in the cache beside the row, so that it is evicted, copied and saved with it.
    """

    name: ClassVar[str]
    needs_scores: ClassVar[bool] = False
    """Whether attention must hand its scores to the cache after every update."""
    needs_weights: ClassVar[bool] = False
    """Whether ``accumulate`` gets weights, ``exp(scores - lse)``, in the place of scores."""
    needs_positions: ClassVar[bool] = True
    """Whether ``accumulate`` looks at positions, which cost a few operations to make."""
    chunk_queries: ClassVar[int | None] = MAX_QUERIES
    """Queries of a chunk that ``accumulate`` sees, counted from its end, at most 128. None: all,
    and their weights come summed, as one query with one head per KV head."""
    kind: ClassVar[Literal["ema", "mass"] | None] = None
    """Where ``accumulate`` is what ``fast.attention_and_accumulate`` does of this kind, attention
    may do it itself, without storing scores; None: it may not."""

    @property
    def decay(self) -> float | None:
        """That of the kind "ema"."""
        return None

    @property
    def folds(self) -> bool:
        """Whether rows that go are folded into others, weighed by their ranks. Attention then adds
        ``ln n`` to the logit of a row that stands for n."""
        return False

    @property
    def needs_attention(self) -> bool:
        """Whether attention must be ours: it hands over scores, or adds what rows stand for."""
        return self.needs_scores or self.folds

    fold_share: ClassVar[float] = 1.0
    """Of the rows that go together, the share that is folded: the nearest."""

    def takes(self, ranks: mx.array) -> mx.array:
        """bool [B, H, N]: whether others may be folded into a row of this rank."""
        return ~mx.isnan(ranks)

    @classmethod
    def recent_rows(cls, rows: int) -> int | None:
        """Recent rows of a budget where no size is given; None: what half of it leaves."""
        return None

    def accumulate(
        self,
        importance: mx.array,
        scores: mx.array,
        *,
        positions: mx.array | None = None,
        masked: bool = True,
    ) -> mx.array:
        """Take in the scores of one attention.

        Args:
            importance: float32 [B, H, N], NaN where a row has not been scored.
            scores: float32 [B, Hq, L, N], logits before the softmax, -inf where masked, queries
                in order; Hq is a multiple of H. Where ``needs_weights``, the weights that the
                softmax makes of them, 0 where masked.
            positions: int32 [B, H, N], as in ``Rows``; None: slots are in order of position, or
                ``needs_positions`` is False.
            masked: False promises that no score is -inf, which allows a shorter path.

        Returns:
            float32 [B, H, N], the new importance; by default unchanged.
        """
        return importance

    @abstractmethod
    def rank(self, rows: Rows) -> mx.array:
        """float32 [B, H, N], higher is kept; NaN goes first. Called only when rows must go."""


class ByScores(Policy):
    """Ranks rows by what ``accumulate`` makes of the scores of attention."""

    needs_scores = True

    def rank(self, rows: Rows) -> mx.array:
        return rows.importance
