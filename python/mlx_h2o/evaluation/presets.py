"""What published tables compare, for one's own model: strategies, tasks, lengths.

The numbers are the tables' own. Where the model or the text is shorter than a table's longest
document, lengths and rows shrink alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = ["PRESETS", "Preset"]

_FEWEST = 40
"""Tokens of a document that was scaled, at least: 32 are the prompt."""


@dataclass(frozen=True)
class Preset:
    """A table.

    mirrors: which one it is, for --help.
    strategies: as :func:`.strategies.parse` reads them, rows in braces. Those of ours have the
        same rows in every layer, as published, unless they say otherwise.
    lengths: tokens of documents, the longest first.
    documents: how many.
    tasks: of :data:`.tasks.TASKS`.
    """

    mirrors: str
    strategies: tuple[str, ...]
    lengths: tuple[int, ...] = (512,)
    documents: int = 10
    tasks: tuple[str, ...] = ("ppl",)

    def settings(self, tokens: int) -> dict[str, Any]:
        """Those of :class:`.tasks.Settings`, for documents of so many tokens at most."""
        share = self._share(tokens)
        lengths = tuple(max(_FEWEST, int(share * length)) for length in self.lengths)
        several = {"lengths": tuple(dict.fromkeys(lengths))} if len(lengths) > 1 else {}
        return {"documents": self.documents, "length": lengths[0], **several}

    def texts(self, tokens: int) -> list[str]:
        """The strategies for documents of so many tokens at most, each once."""
        share = self._share(tokens)

        def rows(found: re.Match[str]) -> str:
            least = 1 if found[1] else 8
            return f"{found[1] or ''}{max(least, int(share * int(found[2])))}"

        scaled = (re.sub(r"(heavy=)?\{(\d+)\}", rows, text) for text in self.strategies)
        return list(dict.fromkeys(map(_equal, scaled)))

    def _share(self, tokens: int) -> float:
        return min(1.0, tokens / self.lengths[0])


def _equal(text: str) -> str:
    ours = not text.startswith(("full", "rotating", "kv")) and ":none" not in text
    return f"{text}:layers=equal" if ours and "layers=" not in text else text


def _each(rows: tuple[int, ...], *forms: str) -> tuple[str, ...]:
    return ("full", *(form.replace("ROWS", f"{{{count}}}") for count in rows for form in forms))


_H2O = "AtomGradient 2026, table"
_SPARSE = "Turney 2026, sec."
_THRESHOLDS = ("1e-4", "1e-5", "1e-6", "1e-7", "1e-8")

PRESETS = {
    "table3": Preset(
        f"{_H2O} 3: a window and two splits at half the text",
        _each((256,), "rotating:ROWS", "h2o-ema:ROWS:heavy={64}", "h2o-ema:ROWS:heavy={128}"),
    ),
    "table4": Preset(
        f"{_H2O} 4: heavy against recent rows",
        _each((256,), "rotating:ROWS", *(f"h2o-ema:ROWS:heavy={{{n}}}" for n in (32, 64, 128))),
        documents=20,
    ),
    "table7": Preset(
        f"{_H2O} 7: rows",
        _each((128, 256, 512, 1024, 2048), "rotating:ROWS", "h2o-ema:ROWS"),
        lengths=(2048,),
        documents=5,
    ),
    "table8": Preset(
        f"{_H2O} 8: lengths",
        _each((256,), "rotating:ROWS", "h2o-ema:ROWS"),
        lengths=(8192, 4096, 2048, 1024, 512),
        documents=2,
    ),
    "table9": Preset(
        f"{_H2O} 9: long texts, few rows",
        _each((256, 512), "rotating:ROWS", "h2o-ema:ROWS"),
        lengths=(32768, 16384, 8192),
        documents=1,
    ),
    "table10": Preset(
        f"{_H2O} 10: bits, the mixed form among them",
        (
            *_each((256,), "rotating:ROWS", "h2o-ema:ROWS", "h2o-ema:ROWS:kv8"),
            "h2o-ema:{256}:kv8:light=4:dense=0",
            "h2o-ema:{256}:kv4",
        ),
    ),
    "table11": Preset(
        f"{_H2O} 11: bits and rows",
        _each(
            (256, 512, 1024),
            "rotating:ROWS",
            "h2o-ema:ROWS",
            "h2o-ema:ROWS:kv8",
            "h2o-ema:ROWS:kv4",
        ),
        lengths=(2048,),
        documents=5,
    ),
    "table14": Preset(
        f"{_H2O} 14: rows by layer",
        _each((256,), "rotating:ROWS", "h2o:ROWS", "h2o:ROWS:layers=probe"),
    ),
    "sparse-v": Preset(
        f"{_SPARSE} 4.5 and 4.8: thresholds, by perplexity and facts",
        (
            "full",
            "keydiff:none:kv4",
            *(f"keydiff:none:kv4:sparse_v={tau}" for tau in _THRESHOLDS),
        ),
        documents=8,
        tasks=("ppl", "needle"),
    ),
    "sparse-v-skips": Preset(
        "Turney 2026, the skip rate by context: of pairs, by layer",
        ("full", "keydiff:none:kv8:sparse_v=1e-6", "keydiff:none:kv4:sparse_v=1e-6"),
        lengths=(4096, 2048, 512),
        documents=8,
        tasks=("skips",),
    ),
    "divergence": Preset(
        f"{_SPARSE} 4.4: divergence by bits", ("full", "kv8", "kv4", "kv3"), documents=8
    ),
}
