"""Packed rows of one width of codes: a tier of a store that holds rows of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from ..operations.buffers import gathered, written
from .packing import Packing
from .recoding import recoded
from .storage import Packed

__all__ = ["PackedRows", "gathered_from"]


class PackedRows(NamedTuple):
    """Keys and values [B, H, N, ...], packed alike; changes give new rows."""

    keys: Packed
    values: Packed
    packing: Packing

    @classmethod
    def of(cls, keys: mx.array, values: mx.array, packing: Packing) -> PackedRows:
        """Rows, quantised."""
        return cls(*packing.packed(keys, values), packing)

    @classmethod
    def none_like(cls, keys: mx.array, values: mx.array, packing: Packing) -> PackedRows:
        """No rows, of the sizes and dtypes of these."""
        shape = keys.shape[:2]
        one = cls.of(
            mx.zeros((*shape, 1, keys.shape[3]), keys.dtype),
            mx.zeros((*shape, 1, values.shape[3]), values.dtype),
            packing,
        )
        return one.none()

    def none(self) -> PackedRows:
        """No rows, packed as these."""
        return self.each(lambda part: part[:, :, :0])

    @property
    def length(self) -> int:
        return self.keys[0].shape[2]

    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values]

    def each(self, change: Callable[[mx.array], mx.array]) -> PackedRows:
        """The rows whose six arrays are ``change`` of these."""
        return self._of([change(part) for part in self.arrays()])

    def _of(self, arrays: Sequence[mx.array]) -> PackedRows:
        kw, ks, kb, vw, vs, vb = arrays
        return self._replace(keys=(kw, ks, kb), values=(vw, vs, vb))

    def dense(self) -> tuple[mx.array, mx.array]:
        """Keys and values as numbers, in the dtype of their scales."""
        return self.packing.unpacked(self.keys, self.values)

    def at(self, slots: mx.array) -> PackedRows:
        """The rows at ``slots`` [B, H, n], as they are packed."""
        return self.each(lambda part: gathered(part, slots))

    def behind(self, others: PackedRows) -> PackedRows:
        """These rows, behind ``others``."""
        pairs = zip(others.arrays(), self.arrays(), strict=True)
        return self._of([mx.concatenate([*pair], axis=2) for pair in pairs])

    def written(self, slots: mx.array, rows: PackedRows) -> PackedRows:
        """With ``rows`` at ``slots`` [B, H, 1], in place where nothing else holds the arrays."""
        pairs = zip(self.arrays(), rows.arrays(), strict=True)
        return self._of([written(stored, slots, part) for stored, part in pairs])

    def chosen(self, where: mx.array, others: PackedRows) -> PackedRows:
        """These rows where ``where`` [B, H, N], else ``others``."""
        flags = mx.expand_dims(where, -1)
        pairs = zip(self.arrays(), others.arrays(), strict=True)
        return self._of([mx.where(flags, one, other) for one, other in pairs])

    def as_packed(self, packing: Packing) -> PackedRows:
        """The same rows with codes of another width: never read, never quantised again."""
        own = self.packing
        return PackedRows(
            recoded(self.keys, own.bits, packing.bits),
            recoded(self.values, own.v_bits, packing.v_bits),
            packing,
        )


def gathered_from(sources: Sequence[PackedRows], slots: mx.array) -> PackedRows:
    """The rows at ``slots`` [B, H, n] of all sources, one behind the other, packed alike."""
    rows = sources[0]
    for source in sources[1:]:
        rows = source.behind(rows)
    return rows.at(slots)
