"""The base of all policies: they rank rows, and may accumulate scores, but store nothing."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import mlx.core as mx

from ..operations.backends import resolve
from ..operations.composed.accumulating import MAX_QUERIES, add_mass
from ..operations.requests import PerSequence


@dataclass
class Rows:
    """The stored rows of one layer, as a policy sees them; slots are in no particular order.

    Attributes:
        keys: [B, H, N, D], the model's dtype, with RoPE applied.
        values: [B, H, N, Dv].
        importance: float32 [B, H, N], the result of ``accumulate``; NaN for unscored rows.
        positions: int32 [B, H, N], the position of each row in the sequence.
        offset: number of tokens that each sequence has seen, the position of its next row.
        keep: number of rows to keep in each head.
        places: how many of these are unprotected, and so chosen by rank.
        sink_size: number of first positions that are protected.
        recent_start: first position of the protected recent window.
    """

    keys: mx.array
    values: mx.array
    importance: mx.array
    positions: mx.array
    offset: PerSequence
    keep: int = 0
    places: int = 0
    sink_size: int = 0
    recent_start: PerSequence | None = None


@dataclass(frozen=True)
class Policy(ABC):
    """Ranks stored rows; the cache evicts the lowest-ranked rows that are not protected.

    Policies hold settings but no state, and are equal if their settings are. The importance of a
    row is stored in the cache next to the row, so that it is evicted, copied and saved with it.
    """

    name: ClassVar[str]
    needs_scores: ClassVar[bool] = False
    """Whether attention must pass its scores to the cache after every update."""
    needs_weights: ClassVar[bool] = False
    """Whether ``accumulate`` gets weights, ``exp(scores - lse)``, instead of scores."""
    needs_positions: ClassVar[bool] = True
    """Whether ``accumulate`` reads positions, which take a few operations to compute."""
    chunk_queries: ClassVar[int | None] = MAX_QUERIES
    """How many of the last queries of a chunk ``accumulate`` sees, at most 128. None: all, with
    their weights summed as if there were one query with one head per KV head; of a long chunk they
    are estimated from at least 512 queries."""
    kind: ClassVar[Literal["ema", "mass"] | None] = None
    """``accumulate`` does the same as ``fast.attention_and_accumulate`` of this kind, so attention
    can do it without storing scores. None: the policy has an ``accumulate`` of its own."""

    @property
    def decay(self) -> float | None:
        """The decay of the kind "ema"."""
        return None

    @property
    def folds(self) -> bool:
        """Whether evicted rows are folded into others, weighted by their ranks. Attention then adds
        ``log(n)`` to the logits of a row that stands for n."""
        return False

    @property
    def needs_attention(self) -> bool:
        """Whether the attention of this package is needed, for scores or for folded rows."""
        return self.needs_scores or self.folds

    fold_share: ClassVar[float] = 1.0
    """Which share of the rows evicted together is folded: those nearest to a row that stays."""

    def takes(self, ranks: mx.array) -> mx.array:
        """bool [B, H, N]: whether other rows may be folded into a row of this rank."""
        return ~mx.isnan(ranks)

    @classmethod
    def recent_rows(cls, rows: int) -> int | None:
        """Default number of recent rows in a budget; None: all but the heavy half."""
        return None

    def accumulate(
        self,
        importance: mx.array,
        scores: mx.array,
        *,
        positions: mx.array | None = None,
        masked: bool = True,
    ) -> mx.array:
        """Accumulate the scores of one attention call.

        Args:
            importance: float32 [B, H, N], NaN for unscored rows.
            scores: float32 [B, Hq, L, N], logits before the softmax, -inf where masked, queries
                in order; Hq is a multiple of H. With ``needs_weights``, their softmax weights, 0
                where masked.
            positions: int32 [B, H, N], as in ``Rows``; None: slots are in order of position, or
                ``needs_positions`` is False.
            masked: False if no score is -inf, which allows a shorter path.

        Returns:
            float32 [B, H, N], the new importance; unchanged without a ``kind``.
        """
        if self.kind == "mass":
            return add_mass(importance, scores.reshape(*importance.shape[:2], -1, scores.shape[3]))
        if self.decay is None:
            return importance
        return resolve().accumulate_scores(importance, scores, decay=self.decay, masked=masked)

    @abstractmethod
    def rank(self, rows: Rows) -> mx.array:
        """float32 [B, H, N]: higher is kept, NaN is evicted first. Called only at evictions."""


class ByScores(Policy):
    """Ranks rows by their accumulated scores."""

    needs_scores = True

    def rank(self, rows: Rows) -> mx.array:
        return rows.importance
