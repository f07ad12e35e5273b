"""Which positions a bounded cache holds while a text is read, small enough to keep in a result.

A heat map has at most 48 moments and 96 ranges of positions; the end has every position. Both are
strings of digits, in which a run such as "0000000" is written "0(7)". Of a text of 640 tokens they
take 2 to 5 KB per layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..caches.cache import H2OKVCache
from ..lm.prompt_cache import evicting_caches
from .facts import Tokenizer

__all__ = ["Recorder", "expanded", "pieces"]

MOMENTS = 48
RANGES = 96

_Floats = npt.NDArray[np.float64]


class Recorder:
    """Looks at the caches of a run, of whose texts side by side it sees the first.

    Args:
        tokens: how many the text has.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._step = -(-tokens // MOMENTS)
        self._width = -(-tokens // RANGES)
        self._moments: list[int] = []
        self._seen: list[list[_Held]] = []
        self._caches: list[H2OKVCache] = []

    def __call__(self, caches: Sequence[Any]) -> None:
        """Look, where it is time to."""
        self._caches = list(evicting_caches(caches))
        read = min(int(cache.offset) for cache in self._caches)
        if read >= (self._moments[-1] + self._step if self._moments else 1):
            self._moments.append(read)
            self._seen.append([_Held(cache, self._tokens) for cache in self._caches])

    def found(self) -> dict[str, Any]:
        """What was seen, and what is held now.

        Keys: "tokens" of the text, the "moments" (tokens read by then), the "width" of a range of
        positions, and "layers", each with its "rows" per head, and of digits: "map", a row of
        moments for each range, and "end", one digit for each position: 0 where no head holds it, 9
        where all do. Where rows were folded also "map_folded" and "end_folded": d where a row
        stands for 2**d rows.
        """
        ends = [_Held(cache, self._tokens) for cache in self._caches]
        layers = []
        for cache, end, seen in zip(self._caches, ends, zip(*self._seen, strict=True), strict=True):
            by_range = [one.ranges(self._width) for one in seen]
            layer: dict[str, Any] = {
                "name": cache.name,
                "rows": cache.size(),
                "map": _digits(np.stack([one.shares for one in by_range], axis=1)),
                "end": _digits(end.shares),
            }
            if cache.row_bias is not None:
                layer["map_folded"] = _powers(np.stack([one.counts for one in by_range], axis=1))
                layer["end_folded"] = _powers(end.counts)
            layers.append(layer)
        return {
            "tokens": self._tokens,
            "moments": self._moments,
            "width": self._width,
            "layers": layers,
        }


class _Held:
    """Of each position: the share of heads that hold it, and how many rows theirs stand for."""

    def __init__(self, cache: H2OKVCache, tokens: int) -> None:
        positions = np.array(cache.positions)[0]  # [heads, rows]
        there = positions >= 0
        rows = np.ones(positions.shape)
        if cache.row_bias is not None:  # ln n
            rows = np.exp(np.array(cache.row_bias)[0, :, : positions.shape[1]])
        places = positions[there]
        heads = np.bincount(places, minlength=tokens)[:tokens]
        self.shares: _Floats = heads / len(positions)
        self._rows: _Floats = np.bincount(places, rows[there], tokens)[:tokens] / len(positions)

    @property
    def counts(self) -> _Floats:
        """Rows that one stands for, on average; 1 where none is held."""
        return np.where(self.shares > 0, self._rows / np.maximum(self.shares, 1e-9), 1.0)

    def ranges(self, width: int) -> _Held:
        """The same of so many positions together."""
        found = object.__new__(_Held)
        starts = np.arange(0, len(self.shares), width)
        sizes = np.diff([*starts, len(self.shares)])
        found.shares = np.add.reduceat(self.shares, starts) / sizes
        found._rows = np.add.reduceat(self._rows, starts) / sizes
        return found


def pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens comes with its last."""
    return list(_pieces(tokenizer, list(tokens)))


def expanded(digits: str) -> str:
    """A string in which runs are written as such, in full."""
    return re.sub(r"(\d)\((\d+)\)", lambda run: run[1] * int(run[2]), digits)


def _pieces(tokenizer: Tokenizer, tokens: list[int]) -> Iterator[str]:
    start, shown = 0, ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[start:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(tokens):
            yield ""
            continue
        yield text[len(shown) :]
        shown = text
        if end - start >= 32:  # decoding takes as long as what it decodes
            start = end - 4
            shown = tokenizer.decode(tokens[start:end])


def _digits(shares: _Floats) -> str:
    return _packed(np.ceil(9 * shares.clip(0, 1) - 1e-9))


def _powers(counts: _Floats) -> str:
    return _packed(np.floor(np.log2(counts.clip(1, 512)) + 1e-6))


def _packed(digits: _Floats) -> str:
    text = "".join(map(str, digits.astype(int).ravel().tolist()))
    return re.sub(r"(\d)\1{4,}", lambda run: f"{run[1]}({len(run[0])})", text)
