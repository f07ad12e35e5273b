"""What a store of one layer's rows is: how they are kept is each store's own affair.

Every update rebinds the arrays to new graph nodes and keeps no other reference, so that MLX can
reuse their buffers; an array object that someone else may hold never changes. Nothing is
evaluated here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from .. import fast
from ..operations.buffers import assigned, gathered, grown
from ..operations.cache_requests import RankName
from ..operations.composed_cache import ages
from ..operations.replace_requests import Statistics
from ..operations.row_exchange import RowExchange, exchange_rows
from .known_worst import KnownWorst, Zones

__all__ = ["DECODE_QUERIES", "Layout", "Packed", "Ranks", "Segment", "Storage", "Stored", "tied"]

DECODE_QUERIES = 8
"""Up to here the kernels return output and scores together, and read packed rows as they are."""

Packed = tuple[mx.array, mx.array, mx.array]
"""Rows as ``mx.quantize`` packs them: words, scales and biases."""

Stored = mx.array | Packed
"""Keys or values as attention takes them."""


Ranks = Callable[[], mx.array]
"""Gives float32 [B, H, length], higher is kept; asked only where a store orders its rows."""


class Segment(NamedTuple):
    """Some rows of a store, and what operations must be told of them where they are packed."""

    keys: Stored
    values: Stored
    settings: dict[str, Any]


def tied(rows: Stored, others: list[mx.array]) -> Stored:
    """``rows``, whose evaluation evaluates ``others`` too."""
    if isinstance(rows, tuple):
        return mx.depends(rows[0], others), rows[1], rows[2]
    result: mx.array = mx.depends(rows, others)
    return result


class Layout(NamedTuple):
    """What all rows of a store share."""

    batch: int
    heads: int
    width: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, rows: mx.array) -> Layout:
        """That of rows [B, H, L, width]."""
        batch, heads, _, width = rows.shape
        return cls(batch, heads, width, rows.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} with B = {self.batch}, H = {self.heads}, row size {self.width}"


class Storage(ABC):
    """``length`` rows in each of B x H heads, and what is remembered of each.

    Attributes:
        importance: float32 [B, H, length], what the policy accumulated, NaN where nothing yet.
        positions: int32 [B, H, length], the place of each row in the sequence.
        key_layout: of the keys as they come, whatever they are stored as.
        value_layout: the same of the values.
        tied: whether evaluating the keys evaluates importance and positions too.
        known: the row that goes next, where attention has named it.
        companions: arrays [B, H, length, ...] that go with the rows, as the keys of an indexer do;
            rows that come have zeros there until somebody sets them. ``nbytes`` leaves them out.
        key_statistics: None, or what ``replace_worst`` shall keep up to date; a store that cannot
            leaves it as it is.
    """

    in_segments: ClassVar[bool] = False
    """Whether ``segments`` gives the rows in parts, which attention should read in place of what
    ``handed`` gives."""

    key_statistics: Statistics | None = None

    takes_known: ClassVar[bool] = False
    """Whether ``replace_worst`` uses ``known``."""

    by_slot: ClassVar[bool] = False
    """Whether rows are read and written by their slots: ``exchange``, ``assign``."""

    def __init__(
        self, key_layout: Layout, value_layout: Layout, importance: mx.array, positions: mx.array
    ) -> None:
        self.key_layout = key_layout
        self.value_layout = value_layout
        self.importance = importance
        self.positions = positions
        self.tied = False
        self.known: KnownWorst | None = None
        self.companions: tuple[mx.array, ...] = ()

    def known_worst(
        self, sink_size: int, recent_start: int, ranks: mx.array | RankName
    ) -> mx.array | None:
        """The slots that a search by ``ranks`` would find, where attention has named them.

        Forgets them: the step that asks changes the rows.
        """
        known, self.known = self.known, None
        if known is None or not (isinstance(ranks, str) and ranks == "importance"):
            return None
        zones = Zones(sink_size, recent_start)
        return known.slots if known.holds(self.importance, self.positions, zones) else None

    @property
    def length(self) -> int:
        return self.positions.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of every stored array, unused rows and the name of the next to go included."""
        named = () if self.known is None else (self.known.slots,)
        arrays = (*self.arrays(), self.importance, self.positions, *named)
        return sum(array.nbytes for array in arrays)

    @property
    def attention_settings(self) -> dict[str, Any]:
        """What operations on packed rows must be told of them; nothing where rows are dense."""
        return {}

    def hands_arrays(self, queries: int) -> bool:
        """Whether ``handed`` gives arrays to so many queries, not packed rows."""
        return True

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """Every array that holds keys or values, unused rows included."""

    @abstractmethod
    def fetch(self) -> tuple[Any, Any]:
        """Keys and values of the rows in use, as they are stored: what a state holds."""

    @abstractmethod
    def handed(self, queries: int) -> tuple[Stored, Stored]:
        """Keys and values of the rows in use, as attention of so many queries takes them."""

    @abstractmethod
    def dense(self) -> tuple[mx.array, mx.array]:
        """The rows in use: [B, H, length, D] and [B, H, length, Dv], in the model's dtype."""

    def segments(self) -> list[Segment]:
        """The rows in parts, in order of slots, where attention should read them apart."""
        return []

    @abstractmethod
    def append(
        self,
        keys: mx.array,
        values: mx.array,
        offset: int,
        limit: int,
        ranks: Ranks | None = None,
    ) -> None:
        """Add rows behind the others, at positions ``offset`` and up, unscored.

        ``limit`` is the length beyond which no room is made in advance; ``ranks`` are those of
        the rows before. O(rows added), and O(rows stored) once in some steps.
        """

    def rest(self, ranks: Ranks | None = None) -> mx.array | None:
        """What a store may do between a chunk, whose scores are in, and the next update.

        Returns the slots [B, H, length] where rows were, if they moved.
        """
        return None

    @abstractmethod
    def replace_worst(
        self,
        keys: mx.array,
        values: mx.array,
        position: int,
        *,
        sink_size: int,
        recent_start: int,
        ranks: mx.array | RankName,
    ) -> None:
        """Write one new row over the worst row of each head: O(1) rows moved.

        As ``fast.replace_worst``, without its checks: the rows are known to fit.
        """

    @abstractmethod
    def keep(self, slots: mx.array, *, ranks: mx.array | None = None, added: int = 0) -> mx.array:
        """Keep only ``slots`` [B, H, n], ascending; no unused rows remain. O(n) rows moved.

        ``ranks`` [B, H, length] are those of all rows, ``added`` the tokens about to come. Returns
        where each row was: ``slots``, but for a store that has an order of its own.
        """

    @abstractmethod
    def replace_keys(self, keys: Any) -> None:
        """Take arrays of the same shapes and dtypes in the place of all keys, as ``fetch`` gives
        them. Raises ValueError where they do not fit."""

    @abstractmethod
    def replace_values(self, values: Any) -> None:
        """The same of the values."""

    def exchange(
        self, slots: mx.array, rows: list[mx.array] | None, start: int = 0
    ) -> list[mx.array]:
        """Put rows at ``slots`` [B, H, n], and return those that were there.

        Rows are as they are stored: of each of ``arrays`` and of what goes with them; None: those
        at the slots ``start`` and up. Importance and positions are not touched.
        """
        arrays = self.arrays()
        request = RowExchange([*arrays, *self.companions], slots, rows, start)
        found, old = exchange_rows(request)
        self._rebind(found[: len(arrays)])
        self.companions = tuple(found[len(arrays) :])
        return old

    def assign(self, start: int, rows: list[mx.array]) -> None:
        """Put rows as ``exchange`` gives them at the slots from ``start`` on."""
        arrays = self.arrays()
        pairs = zip((*arrays, *self.companions), rows, strict=True)
        found = [assigned(array, start, new) for array, new in pairs]
        self._rebind(found[: len(arrays)])
        self.companions = tuple(found[len(arrays) :])

    def as_stored(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """New rows as ``exchange`` takes them; what goes with them is zeros."""
        beside = [mx.zeros((*keys.shape[:3], c.shape[3]), c.dtype) for c in self.companions]
        return [*self._stored(keys, values), *beside]

    def _stored(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        raise NotImplementedError(f"[{type(self).__name__}] rows have no slots of their own.")

    def reserve(self, length: int) -> None:
        """Room for ``length`` rows, also among what goes with them."""
        self._make_room(length)
        self.companions = tuple(_roomy(array, length) for array in self.companions)

    def _make_room(self, length: int) -> None:
        arrays = self.arrays()
        if any(array.shape[2] < length for array in arrays):
            self._rebind([_roomy(array, length) for array in arrays])

    def _rebind(self, arrays: list[mx.array]) -> None:
        """Take the place of ``arrays()``."""
        raise NotImplementedError(f"[{type(self).__name__}] rows have no slots of their own.")

    def ranked(self, ranks: mx.array | RankName, position: int) -> mx.array:
        """The ranks that a name stands for, ``position`` being that of the next row."""
        if isinstance(ranks, mx.array):
            return ranks
        if ranks == "age":
            return ages(self.positions, position)
        if ranks == "key_diversity":
            return fast.key_diversity(self.dense()[0])
        return self.importance

    def truncate(self, length: int) -> None:
        """Forget the rows from slot ``length`` on; their space stays."""
        self.remember(self.importance[:, :, :length], self.positions[:, :, :length])

    def remember(self, importance: mx.array, positions: mx.array) -> None:
        """Importance and positions of the rows in use, which may become fewer."""
        self.tied = False
        self.importance, self.positions = importance, positions
        self.companions = tuple(array[:, :, : self.length] for array in self.companions)

    def _remember_unscored(self, added: int, offset: int) -> None:
        """Importance and positions of ``added`` rows behind the others."""
        self.tied = False
        heads = self.positions.shape[:2]
        unscored = mx.full((*heads, added), mx.nan, mx.float32)
        positions = mx.arange(offset, offset + added, dtype=mx.int32)
        positions = mx.broadcast_to(positions, (*heads, added))
        self.importance = mx.concatenate([self.importance, unscored], axis=2)
        self.positions = mx.concatenate([self.positions, positions], axis=2)
        self.companions = tuple(_roomy(array, self.length) for array in self.companions)

    def _keep_remembered(self, slots: mx.array) -> None:
        """Importance and positions of ``slots``."""
        self.tied = False
        self.importance = mx.take_along_axis(self.importance, slots, axis=2)
        self.positions = mx.take_along_axis(self.positions, slots, axis=2)
        self.companions = tuple(gathered(array, slots) for array in self.companions)


def _roomy(array: mx.array, length: int) -> mx.array:
    used = array.shape[2]
    return array if used >= length else grown(array, used, array[:, :, :0], length)
