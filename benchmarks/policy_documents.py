"""Texts for the comparison of policies, each with facts planted early, all of one length."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_h2o import demo
from mlx_h2o.evaluation.facts import PlantedText, plant

__all__ = ["Document", "documents"]

_PLACES = (0.25, 0.5, 0.75)
"""Where in a book its documents begin: away from title pages and licences."""

_CHARACTERS = 8
"""More than a token of the demo model stands for: characters to cut out per token wanted."""


@dataclass(frozen=True)
class Document:
    """Where a text is from, and its tokens and facts."""

    source: str
    planted: PlantedText


def documents(
    tokenizer: Any, corpora: Path | None, *, length: int, facts: int, count: int | None = None
) -> list[Document]:
    """The embedded text, and three places of each book of ``corpora``/books_eval.

    Those books are public-domain texts that the demo model was not trained on. Where they are not,
    says so on standard error.
    """
    texts = [("mlx_h2o.demo.text()", demo.text())]
    books = sorted((corpora / "books_eval").glob("*.txt")) if corpora is not None else []
    if not books:
        print(f"NO BOOKS at {corpora}: one document only, which decides nothing.", file=sys.stderr)
    for place in _PLACES:
        for book in books:
            text = book.read_text(encoding="utf-8", errors="replace")
            start = text.index(" ", int(place * len(text)))
            cut = text[start : start + _CHARACTERS * length]
            texts.append((f"books_eval/{book.name} from {place:.0%}", cut))
    return [
        Document(source, plant(tokenizer, text, length=length, facts=facts, seed=seed))
        for seed, (source, text) in enumerate(texts[:count])
    ]
