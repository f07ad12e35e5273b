"""The row that goes next, as attention named it, for as long as that holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from .. import fast

if TYPE_CHECKING:
    from .storage import Storage

__all__ = ["KnownWorst", "Zones", "scored_attention"]


class Zones(NamedTuple):
    """The protected zones of a step, as ``fast.replace_worst`` takes them."""

    sink_size: int
    recent_start: int


class KnownWorst(NamedTuple):
    """``slots`` uint32 [B, H]: the worst rows by this importance, these positions and zones.

    Whatever changes a store gives it another importance or other positions, as array objects;
    so nothing need be told when rows are cut, gathered, assigned or scored again.
    """

    slots: mx.array
    importance: mx.array
    positions: mx.array
    zones: Zones

    def holds(self, importance: mx.array, positions: mx.array, zones: Zones) -> bool:
        """Whether the search of these arrays and zones would find the same."""
        same = self.importance is importance and self.positions is positions
        return same and self.zones == zones


def scored_attention(
    store: Storage, zones: Zones | None, queries: mx.array, keys: Any, values: Any, **settings: Any
) -> mx.array:
    """Attention whose scores go into the importance of the stored rows.

    ``settings`` are those of ``fast.attention_and_accumulate``. With ``zones``, those of the next
    step, the store then knows which row goes.
    """
    settings |= store.attention_settings
    if zones is None:
        result: tuple[mx.array, mx.array] = fast.attention_and_accumulate(
            queries, keys, values, store.importance, **settings
        )
        out, store.importance = result
        return out
    out, store.importance, worst = fast.attention_and_accumulate(
        queries, keys, values, store.importance, positions=store.positions, **zones._asdict(),
        **settings,
    )  # fmt: skip
    store.known = KnownWorst(worst, store.importance, store.positions, zones)
    return out
