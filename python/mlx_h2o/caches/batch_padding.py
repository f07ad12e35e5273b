"""Padding of a batch: announced before it comes, masked while it is there, moved to the left."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .batch_masks import chunk_mask, decode_mask
from .batched import BatchedRows

__all__ = ["PaddedRows"]


class PaddedRows(BatchedRows):
    """Rows of several sequences whose tokens come in one array, padded to the longest."""

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self._store is None

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce padding among the tokens to come, before the model is called.

        Args:
            left_padding: tokens of padding that come first, for each sequence; only while the
                batch is empty.
            lengths: tokens of its own that each sequence is given before ``finalize``; what comes
                then is padding.
            right_padding: how much that is; needs ``lengths``.

        Raises:
            ValueError: numbers other than one per sequence, or padding at a wrong moment.
        """
        op = "[BatchH2OKVCache.prepare]"
        given = {"left_padding": left_padding, "lengths": lengths, "right_padding": right_padding}
        for name, numbers in given.items():
            if numbers is None:
                continue
            if len(numbers) != len(self._lines) or min(numbers, default=0) < 0:
                raise ValueError(
                    f"{op} {name} is {list(numbers)}, expected {len(self._lines)} numbers of at "
                    "least 0, one per sequence."
                )
        if left_padding is not None and not self.empty():
            raise ValueError(f"{op} left_padding is given, expected it before the first tokens.")
        if right_padding is not None and max(right_padding, default=0) > 0 and lengths is None:
            raise ValueError(f"{op} right_padding is given without lengths, expected both.")
        for place, line in enumerate(self._lines):
            if left_padding is not None:
                line.before += int(left_padding[place])
            if lengths is not None:
                line.remaining = int(lengths[place])
        self._count()

    def finalize(self) -> None:
        """End what ``prepare`` announced on the right; padding goes to the left."""
        self._settle()
        for line in self._lines:
            line.remaining = None

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask for the next ``length`` tokens: as of ``H2OKVCache``, without padding.

        bool [B, 1, length, rows + length] where any sequence has padding.
        """
        self._check_window(window_size)
        self._settle()
        before = 0 if self._store is None else self._store.length
        spans = [line.span(length) for line in self._lines]
        if self._overwrites(spans, length):
            rows = [min(line.rows + 1, before) for line in self._lines]
            return decode_mask([before - count for count in rows], before)
        kept = self._kept([stop - start for start, stop in spans])
        if kept != [line.rows for line in self._lines]:
            before = max(kept)
        padding = [before - rows for rows in kept]
        if length == 1 and all(span == (0, 1) for span in spans):
            return decode_mask(padding, before + 1)
        return chunk_mask(padding, spans, before, length, return_array=return_array)

    def _check_window(self, window_size: int | None) -> None:
        if window_size is not None:
            raise ValueError(
                f"[BatchH2OKVCache.make_mask] window_size is {window_size}, expected None: "
                f"{self._described()} evicts rows, and cannot serve a sliding-window layer."
            )
