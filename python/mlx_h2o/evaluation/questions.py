"""Texts, alone or followed by questions: planted facts, chats of two turns, RULER's samples.

Texts are given as (name, text), and are cut into separate windows of one length.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from ..errors import check_int
from .arms import PROMPT
from .facts import WORDINGS, Fact, Tokens, continued, draw, encode, insert


@dataclass(frozen=True)
class Settings:
    """Settings that all arms share, with the help of flags. Raises SettingError if out of range."""

    documents: Annotated[int, "texts of each task, or 1 of the embedded text"] = 4
    length: Annotated[int, "tokens of each where losses are measured"] = 768
    step: Annotated[int, "tokens that are read at once there"] = 1  # each sees all before it
    lengths: Annotated[tuple[int, ...], "tokens of texts or chats with facts"] = (1000, 2000, 4000)
    facts: Annotated[int, "facts in each text"] = 16
    wordings: tuple[str, ...] = tuple(name for name in WORDINGS if name != "secret")  # in turn
    writing: Annotated[int, "tokens to write"] = 6000
    ruler: str | None = None  # a file of RULER's samples
    seed: Annotated[int, "draws facts, written tokens, and rows that random policies keep"] = 0

    def __post_init__(self) -> None:
        low = {"documents": 1, "step": 1, "facts": 1, "length": PROMPT + 2, "writing": 4, "seed": 0}
        for name, least in low.items():
            check_int("evaluate", name, getattr(self, name), least, most=2**64 - 1)
        for length in self.lengths:
            check_int("evaluate", "lengths", length, 40 * self.facts, more=": 40 for each fact")


@dataclass(frozen=True)
class Asked:
    """A text, and the questions after it with their answers."""

    text: Tokens
    asked: tuple[tuple[Tokens, Tokens], ...]


def windows(
    tokenizer: Any, texts: Sequence[tuple[str, str]], *, count: int, length: int
) -> list[Tokens]:
    """`count` windows of `length` tokens, spread over the texts in turn.

    Windows of a text do not overlap. If the tokenizer begins a text with a special token, so does
    each window.

    Raises ValueError if the texts are too short.
    """
    first = _front(tokenizer)
    size = length - len(first)
    found: list[Tokens] = []
    for number, (name, text) in enumerate(texts):
        share = count // len(texts) + (number < count % len(texts))
        tokens = encode(tokenizer, text) if share else ()
        if len(tokens) < share * size:
            raise ValueError(
                f"{name} has {len(tokens):,} tokens, expected at least {share * size:,}: "
                f"{share} texts of {size:,}; or lower --documents, --length or --lengths"
            )
        gap = len(tokens) // share if share else 0
        found += [(*first, *tokens[at * gap : at * gap + size]) for at in range(share)]
    return found


def planted_texts(
    tokenizer: Any, texts: Sequence[tuple[str, str]], length: int, settings: Settings
) -> list[Asked]:
    """Texts of ``length`` tokens with facts spread over them, in all wordings in turn."""
    bodies = windows(tokenizer, texts, count=settings.documents, length=length)
    return [
        _planted(tokenizer, body, settings.facts, random.Random(f"{settings.seed} {at}"), settings)
        for at, body in enumerate(bodies)
    ]


def chats(
    tokenizer: Any, texts: Sequence[tuple[str, str]], length: int, settings: Settings
) -> list[Asked]:
    """Chats of two turns of half the tokens each; the facts are in the first."""
    bodies = windows(tokenizer, texts, count=2 * settings.documents, length=length // 2)
    bodies = [one[len(_front(tokenizer)) :] for one in bodies]  # the chat begins but once
    start, middle, (*closing, last) = _frame(tokenizer)
    found = []
    for number, (one, other) in enumerate(zip(bodies[::2], bodies[1::2], strict=True)):
        chance = random.Random(f"{settings.seed} {number} turns")
        first = _planted(tokenizer, one, max(1, settings.facts // 2), chance, settings)
        asked = tuple(((last, *prompt[1:]), answer) for prompt, answer in first.asked)
        found.append(Asked((*start, *first.text, *middle, *other, *closing), asked))
    return found


def samples(tokenizer: Any, file: str, count: int) -> list[Asked]:
    """The first samples of a file of RULER, with each question split from its text."""
    found = []
    with Path(file).open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, count), 1):
            try:
                sample = json.loads(line)
                text, newline, question = sample["input"].rpartition("\n")
                asked, wanted = continued(tokenizer, question, f" {sample['outputs'][0]}")
                _ = text[0], asked[0], wanted[0]  # none of them is empty
            except (AttributeError, ValueError, LookupError, TypeError) as error:
                said = f"{file}: line {number} is not a RULER sample, expected JSON with input, a"
                raise ValueError(f"{said} text whose last line asks, and outputs") from error
            read = (*_front(tokenizer), *encode(tokenizer, text + newline))
            found.append(Asked(read, ((asked, wanted),)))
    if not found:
        raise ValueError(f"{file} has no samples of RULER, expected one a line")
    return found


def _planted(
    tokenizer: Any, body: Tokens, count: int, chance: random.Random, settings: Settings
) -> Asked:
    """The body with `count` facts among it; its end is cut, so that the length stays the same."""
    wordings = settings.wordings
    drawn = [draw(tokenizer, one, -(-count // len(wordings)), chance) for one in wordings]
    # Wordings take turns, so that facts at the same place of several texts have one length.
    facts: list[Fact] = [fact for turn in zip(*drawn, strict=True) for fact in turn][:count]
    left = len(body) - sum(len(fact.line) for fact in facts)
    places = [max(1, left * number // count) for number in range(count)]
    # The last token of the text begins each question, so that nothing is read twice.
    *text, last = insert(tokenizer, body[:left], facts, places)
    return Asked(tuple(text), tuple(((last, *fact.question), fact.answer) for fact in facts))


def _frame(tokenizer: Any) -> tuple[Tokens, Tokens, Tokens]:
    """The tokens before, between and after two texts in a chat, by the tokenizer's own template or
    in plain words."""
    said = ("Read this:\n\n@1@", "I have read it.", "And this:\n\n@2@\n\nWhat did the first say?")
    if getattr(tokenizer, "chat_template", None):
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": text} for r, text in zip(roles, said, strict=True)]
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        first: Tokens = ()
    else:
        chat = "User: {}\n\nAssistant: {}\n\nUser: {}\n\nAssistant:".format(*said)
        first = _front(tokenizer)
    before, _, rest = chat.partition("@1@")
    between, _, behind = rest.partition("@2@")
    one, two, three = (encode(tokenizer, part) for part in (before, between, behind))
    return (*first, *one), two, three


def _front(tokenizer: Any) -> Tokens:
    """The special token that begins a text, if the tokenizer adds one."""
    alone = tokenizer.encode("")
    first = getattr(tokenizer, "bos_token_id", None)
    return (first,) if first is not None and alone[:1] == [first] else ()
