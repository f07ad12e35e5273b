"""Windows of texts, all of one length, away from each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from .facts import Tokenizer

__all__ = ["Document", "counted", "windows"]


@dataclass(frozen=True)
class Document:
    """A window of a text.

    source: the text's name.
    start: the index of its first token in the text.
    tokens: its tokens, the special ones in front among them.
    """

    source: str
    start: int
    tokens: tuple[int, ...]

    @property
    def hash(self) -> str:
        """SHA-256 of the tokens, as decimal numbers with commas."""
        return hashlib.sha256(",".join(map(str, self.tokens)).encode()).hexdigest()


def windows(
    tokenizer: Tokenizer, texts: Sequence[tuple[str, str]], *, count: int, length: int
) -> list[Document]:
    """At most `count` windows of `length` tokens, spread over the texts (name, text) in turn.

    Windows of a text do not overlap. A single text that is shorter than `length` is one window.
    What the tokenizer puts in front of a text, such as a token that begins it, begins each window.

    Raises ValueError if a text has no tokens, or several texts are too short.
    """
    front = _front(tokenizer)
    size = length - len(front)
    cut: list[list[Document]] = []
    for number, (name, text) in enumerate(texts):
        tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
        if not tokens:
            raise ValueError(f"{name} is empty, expected a text")
        share = count // len(texts) + (number < count % len(texts))
        whole = min(share, len(tokens) // size)
        if not whole and len(texts) > 1 and share:
            raise ValueError(f"{name} has {len(tokens)} tokens, expected at least {size}")
        gap = (len(tokens) - whole * size) // whole if whole else 0
        starts = [index * (size + gap) for index in range(whole)] or [0] * bool(share)
        cut.append(
            [Document(name, start, (*front, *tokens[start : start + size])) for start in starts]
        )
    return [document for of_text in cut for document in of_text]


def _front(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token that begins a text, where the tokenizer puts one in front."""
    alone = tokenizer.encode("")
    first = getattr(tokenizer, "bos_token_id", None)
    return (first,) if first is not None and alone[:1] == [first] else ()


def counted(number: int, name: str) -> str:
    """With the plural where it is one."""
    return f"{number} {name}{'' if number == 1 else 's'}"
