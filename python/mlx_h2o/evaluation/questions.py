"""Texts followed by questions: planted facts, chats of two turns, samples of RULER."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .facts import WORDINGS, Fact, Tokenizer, draw, insert
from .settings import Settings
from .texts import Tokens, front, windows

__all__ = ["Asked", "chats", "planted_texts", "samples"]


@dataclass(frozen=True)
class Asked:
    """A text and what is asked after it: prompts and answers."""

    text: Tokens
    asked: tuple[tuple[Tokens, Tokens], ...]


def planted_texts(
    tokenizer: Tokenizer, texts: Sequence[tuple[str, str]], length: int, settings: Settings
) -> list[Asked]:
    """Texts of a number of tokens with facts spread over them, their wordings in turn."""
    bodies = windows(tokenizer, texts, count=settings.documents, length=length)
    found = []
    for number, body in enumerate(bodies):
        facts = _facts(tokenizer, settings.facts, random.Random(f"{settings.seed} {number}"))
        found.append(_with(tokenizer, body, facts, length))
    return found


def _facts(tokenizer: Tokenizer, count: int, chance: random.Random) -> list[Fact]:
    """So many facts, their wordings in turn, so that those at one place have one length."""
    wordings = [one for one in WORDINGS if one != "secret"]
    share = -(-count // len(wordings))
    drawn = [draw(tokenizer, wording, share, chance) for wording in wordings]
    return [fact for turn in zip(*drawn, strict=True) for fact in turn][:count]


def _with(tokenizer: Tokenizer, body: Sequence[int], facts: Sequence[Fact], length: int) -> Asked:
    left = length - sum(len(fact.tokens) for fact in facts)
    places = [left * number // len(facts) for number in range(len(facts))]
    planted = insert(tokenizer, body[:left], facts, [max(1, place) for place in places])
    # Its last token begins each question, so that nothing is read twice.
    *text, last = planted.tokens
    asked = tuple(((last, *fact.question.prompt), fact.question.answer) for fact in facts)
    return Asked(tuple(text), asked)


def chats(
    tokenizer: Tokenizer, texts: Sequence[tuple[str, str]], length: int, settings: Settings
) -> list[Asked]:
    """Chats of two turns of half the tokens each; the facts are in the first."""
    half = length // 2
    bodies = windows(tokenizer, texts, count=2 * settings.documents, length=half)
    start, middle, end = _frame(tokenizer)
    found = []
    for number in range(settings.documents):
        chance = random.Random(f"{settings.seed} {number} turns")
        facts = _facts(tokenizer, max(1, settings.facts // 2), chance)
        first = _with(tokenizer, bodies[2 * number], facts, half)
        *closing, last = end
        whole = (*start, *first.text, *middle, *bodies[2 * number + 1], *closing)
        asked = tuple(((last, *prompt[1:]), answer) for prompt, answer in first.asked)
        found.append(Asked(whole, asked))
    return found


def _frame(tokenizer: Any) -> tuple[Tokens, Tokens, Tokens]:
    """What stands before, between and after two texts in a chat: the tokenizer's own template, or
    plain words."""
    said = ("Read this:\n\n@1@", "I have read it.", "And this:\n\n@2@\n\nWhat did the first say?")
    if getattr(tokenizer, "chat_template", None):
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": text} for r, text in zip(roles, said, strict=True)]
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        first: Tokens = ()
    else:
        chat = "User: {}\n\nAssistant: {}\n\nUser: {}\n\nAssistant:".format(*said)
        first = front(tokenizer)
    before, _, rest = chat.partition("@1@")
    between, _, behind = rest.partition("@2@")
    parts = (tokenizer.encode(part, add_special_tokens=False) for part in (before, between, behind))
    one, two, three = (tuple(part) for part in parts)
    return (*first, *one), two, three


def samples(tokenizer: Tokenizer, file: str, count: int) -> list[Asked]:
    """The first samples of a file of RULER, each question apart from its text."""
    found = []
    with Path(file).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number == count:
                break
            try:
                sample = json.loads(line)
                said, answer = sample["input"], sample["outputs"][0]
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    f"{file}: line {number + 1} is no sample of RULER, expected JSON with input "
                    "and outputs"
                ) from error
            text, newline, question = said.rpartition("\n")
            tokens = tokenizer.encode(text + newline, add_special_tokens=False)
            asked = tokenizer.encode(question, add_special_tokens=False)
            wanted = tokenizer.encode(f"{question} {answer}", add_special_tokens=False)
            pair = tuple(asked), tuple(wanted[len(asked) :])
            found.append(Asked((*front(tokenizer), *tokens), (pair,)))
    return found
