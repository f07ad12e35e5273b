"""Facts in several wordings for any tokenizer, planted in texts, and the questions for them.

Keys, and the values of some wordings, are words that are one token with their leading space. A
question is the beginning of its fact, which a language model continues. Tokenizers must be
hashable, with the methods of mlx_lm's `TokenizerWrapper`.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

Tokens = tuple[int, ...]


class Fact(NamedTuple):
    """A line to plant, its question, and the answer that must follow the question."""

    line: Tokens
    question: Tokens
    answer: Tokens


@dataclass(frozen=True)
class Wording:
    """How a fact is worded. `{key}` and `{word}` bring their leading space, digits bring none."""

    line: str  # the fact up to its value
    value: str  # `{word}`, or as many `#` as digits; a space in front of them is the line's
    end: str  # what follows the value in the text
    question: str | None = None  # the text that asks for the value; None: the line itself


WORDINGS = {
    # The wordings that the two models of 5M parameters were trained on.
    "secret": Wording("\nsecret{key}", "####", ".\n"),
    "is": Wording("\nThe{key} is", "{word}", ".\n"),
    # Sentences that any language model can continue.
    "number": Wording(" The secret number of the{key} is", " ####", "."),
    "password": Wording(" The password of the{key} is", "{word}", "."),
    # RULER's needle (Hsieh et al. 2024), asked as there.
    "ruler": Wording(
        "\nOne of the special magic numbers for{key} is:",
        " #######",
        ".\n",
        "\nWhat is the special magic number for{key} mentioned in the provided text? The special "
        "magic number for{key} mentioned in the provided text is:",
    ),
}


def draw(tokenizer: Any, wording: str, count: int, chance: random.Random) -> list[Fact]:
    """Draw facts of one wording with different keys, all with the same numbers of tokens.

    These are the most common numbers with this tokenizer. With them, texts can be read side by
    side.

    Raises ValueError if the tokenizer has too few keys of that length.
    """
    words, found = _words(tokenizer), list[Fact]()
    lengths = _lengths(tokenizer, wording) if words else None
    keys = list(words)
    chance.shuffle(keys)
    for key in keys:
        if len(found) == count:
            break
        for _ in range(8):  # some values have other numbers of tokens
            fact = _fact(tokenizer, wording, key, chance.choice(words), chance)
            if tuple(map(len, fact)) == lengths:
                found.append(fact)
                break
    if len(found) < count:
        said = f"found {len(found)} facts in the wording {wording!r}, expected {count}"
        raise ValueError(f"[draw] {said}: the tokenizer has too few words for keys.")
    return found


def insert(
    tokenizer: Any, body: Sequence[int], facts: Sequence[Fact], places: Sequence[int]
) -> Tokens:
    """Insert facts into a text, each before the first word that begins at its place or after it.

    Args:
        body: the tokens of the text.
        places: indices into `body`, ascending, one for each fact.
    """
    tokens: list[int] = []
    taken = 0
    for fact, wanted in zip(facts, places, strict=True):
        place = _word_end(tokenizer, body, max(wanted, taken))
        tokens += [*body[taken:place], *fact.line]
        taken = place
    return *tokens, *body[taken:]


def _fact(tokenizer: Any, wording: str, key: str, word: str, chance: random.Random) -> Fact:
    form = WORDINGS[wording]
    digits = form.value.count("#")
    value = form.value.replace("{word}", word)
    if digits:
        value = value.replace("#" * digits, f"{chance.randrange(10**digits):0{digits}d}")
    line, answer = continued(tokenizer, form.line.format(key=key), value)
    end = encode(tokenizer, form.end)
    asked = line if form.question is None else encode(tokenizer, form.question.format(key=key))
    return Fact((*line, *answer, *end), asked, answer)


@lru_cache(maxsize=64)
def _lengths(tokenizer: Any, wording: str) -> tuple[int, ...]:
    """The most common numbers of tokens of facts in this wording."""
    chance, words = random.Random(wording), _words(tokenizer)
    facts = (
        _fact(tokenizer, wording, chance.choice(words), chance.choice(words), chance)
        for _ in range(64)
    )
    return Counter(tuple(map(len, fact)) for fact in facts).most_common(1)[0][0]


def encode(tokenizer: Any, text: str) -> Tokens:
    """The tokens of a part of a text."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def continued(tokenizer: Any, asked: str, answer: str) -> tuple[Tokens, Tokens]:
    """The tokens of a question, and of its answer right after it; encoded apart if a token would
    span both."""
    first, whole = encode(tokenizer, asked), encode(tokenizer, asked + answer)
    alike = whole[: len(first)] == first
    return first, whole[len(first) :] if alike else encode(tokenizer, answer)


_LEADING_SPACE = ("\u0120", "\u2581")
"""How byte-level tokenizers and SentencePiece write a leading space."""


@lru_cache(maxsize=8)
def _words(tokenizer: Any) -> Sequence[str]:
    """Words of more than four letters, one token each with their leading space, sorted."""
    spaced = (token for token in tokenizer.get_vocab() if token.startswith(_LEADING_SPACE))
    words = {token[1:] for token in spaced if token[1:].isascii() and token[1:].isalpha()}
    return sorted(f" {word}" for word in words if len(word) > 4)


_REACH = 64
"""Tokens within which the next word begins, in languages that write spaces."""


def _word_end(tokenizer: Any, tokens: Sequence[int], place: int) -> int:
    """The first index from `place` on whose token begins a word, so that no word is split."""
    ahead = range(place, min(place + _REACH, len(tokens)))
    return next((at for at in ahead if _begins_word(tokenizer, tokens[at])), place)


def _begins_word(tokenizer: Any, token: int) -> bool:
    if str(tokenizer.convert_ids_to_tokens(token)).startswith(_LEADING_SPACE):
        return True  # SentencePiece drops the space of a token decoded alone
    return str(tokenizer.decode([token])).startswith(" ")
