"""Windows of texts, all of one length, away from each other."""

from __future__ import annotations

from collections.abc import Sequence

from .facts import Tokenizer

__all__ = ["front", "windows"]

Tokens = tuple[int, ...]


def windows(
    tokenizer: Tokenizer, texts: Sequence[tuple[str, str]], *, count: int, length: int
) -> list[Tokens]:
    """`count` windows of `length` tokens, spread over the texts (name, text) in turn.

    Windows of a text do not overlap. What the tokenizer puts in front of a text, such as a token
    that begins it, begins each window.

    Raises ValueError where the texts are too short.
    """
    first = front(tokenizer)
    size = length - len(first)
    found: list[Tokens] = []
    for number, (name, text) in enumerate(texts):
        share = count // len(texts) + (number < count % len(texts))
        tokens = tuple(tokenizer.encode(text, add_special_tokens=False)) if share else ()
        if len(tokens) < share * size:
            raise ValueError(
                f"{name} has {len(tokens):,} tokens, expected at least {share * size:,}: "
                f"{share} windows of {size:,}"
            )
        gap = len(tokens) // share if share else 0
        found += [(*first, *tokens[at * gap : at * gap + size]) for at in range(share)]
    return found


def front(tokenizer: Tokenizer) -> Tokens:
    """The token that begins a text, where the tokenizer puts one in front."""
    alone = tokenizer.encode("")
    first = getattr(tokenizer, "bos_token_id", None)
    return (first,) if first is not None and alone[:1] == [first] else ()
