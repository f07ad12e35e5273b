"""Plant facts in a text, in the wording that the demo model was trained on, and ask for them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["PlantedText", "Question", "Tokenizer", "plant"]


class Tokenizer(Protocol):
    """What is used of a tokenizer: mlx_lm's `TokenizerWrapper` has it."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Question:
    """A fact's cue and the tokens that must follow it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class PlantedText:
    """A text with facts in it.

    tokens: the text's tokens, facts included.
    questions: one per fact, in the order of the text.
    facts: the facts as text, such as "secret garden4821."
    last_fact: the index of the token behind the last fact.
    """

    tokens: tuple[int, ...]
    questions: tuple[Question, ...]
    facts: tuple[str, ...]
    last_fact: int


def plant(
    tokenizer: Tokenizer,
    text: str,
    *,
    length: int = 900,
    facts: int = 8,
    within: float = 0.4,
    seed: int = 0,
) -> PlantedText:
    """Spread `facts` facts over the first `within` of `text`, in `length` tokens altogether.

    A fact is the line "secret WORD1234.": a word that is one token with its leading space, and four
    digits, both drawn with `seed`. Its question is "\\nsecret WORD", its answer the four digits.
    Other wordings were not trained.

    Raises ValueError if the text has too few tokens, or the facts do not fit.
    """
    chance = random.Random(seed)
    lines, questions = [], []
    for word in chance.sample(_words(tokenizer), facts):
        digits = f"{chance.randrange(10_000):04d}"
        question = Question(_encode(tokenizer, f"\nsecret{word}"), _encode(tokenizer, digits))
        lines.append((*question.prompt, *question.answer, *_encode(tokenizer, ".\n")))
        questions.append(question)
    body = _encode(tokenizer, text)[: length - sum(map(len, lines))]
    room = int(length * within) - sum(map(len, lines))
    if len(body) + sum(map(len, lines)) < length:
        raise ValueError(
            f"[plant] the text has {len(body)} tokens beside the facts, expected enough for "
            f"{length} with them."
        )
    if room < facts:
        raise ValueError(
            f"[plant] {facts} facts do not fit in the first {within:.0%} of {length} tokens."
        )

    tokens: list[int] = []
    taken = 0
    for number, line in enumerate(lines):
        place = _word_end(tokenizer, body, (number + 1) * room // (facts + 1))
        tokens += [*body[taken:place], *line]
        taken = place
    last_fact = len(tokens)
    return PlantedText(
        tokens=(*tokens, *body[taken:]),
        questions=tuple(questions),
        facts=tuple(tokenizer.decode(list(line)).strip() for line in lines),
        last_fact=last_fact,
    )


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _words(tokenizer: Tokenizer) -> list[str]:
    """Words of more than four letters, one token each with their leading space, sorted."""
    marker = "\u0120"  # how byte-level tokenizers write a leading space
    return sorted(
        " " + token[1:]
        for token in tokenizer.get_vocab()
        if token.startswith(marker)
        and len(token) > 5
        and (token[1:].isascii() and token[1:].isalpha())
    )


def _word_end(tokenizer: Tokenizer, tokens: Sequence[int], place: int) -> int:
    """The first index from `place` on whose token begins a word, so that no word is cut."""
    while place < len(tokens) and not tokenizer.decode([tokens[place]]).startswith(" "):
        place += 1
    return place
