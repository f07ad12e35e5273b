"""Puts a fault into C++, C, Metal or Swift: found by the function, changed in a few tokens.

    Edit("Piece::kv_head", "kv_head + 1 ... ;", "kv_head ... ;")

``find`` is compared token by token, so spaces, line breaks and comments do not matter; its
``...`` matches anything within a statement, and stands for the same text in ``put``. The place is
the name of a function, struct or namespace, qualified as far as necessary, "" for a whole text
(the body of a kernel), or a comment on the line in question, "// fault: its name". A ``find`` that
is not in its place, or occurs more than once, is a PlaceError. The ``*.toml`` files here are
tables of such edits, by what is wrong.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
LITERAL = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'")
SCOPE = re.compile(
    r"\b(?:struct|class|namespace|extension|enum)\s+(?:class\s+)?([\w:.]+)[^;{}()]*\{"
)
HEAD = re.compile(r"([\w:~]+)\s*(?:<[^<>(){};]*>)?\s*\(")
# What may stand between the parameters of a function and its body.
AFTER = re.compile(
    r"(?:\s|\b(?:const|noexcept|override|final|throws|rethrows|async|mutable)\b"
    r"|->\s*[\w:<>\[\]?.,*& ]+|\bwhere\b[^{};]*|:(?!:)(?:\w\{[^;{}]*\}|[^;{}])+)*\{"
)
NOT_FUNCTIONS = {"if", "for", "while", "switch", "catch", "constexpr", "return", "guard", "sizeof"}
TOKEN = re.compile(r"\.\.\.|\w+|\S")


class PlaceError(Exception):
    """A place that is not there, or not once."""


@dataclass(frozen=True)
class Edit:
    """In ``place``, the tokens ``find`` become the text ``put``; ``at`` says which, from 1.

    It shows by a complaint with the words ``caught``, in the call that ``case`` names.
    """

    place: str
    find: str
    put: str
    at: int | None = None
    every: bool = False
    caught: str = ""
    case: str = ""

    def apply(self, text: str) -> str:
        """The text with the fault. Raises PlaceError."""
        found = self.matches(text)
        if self.at is not None and self.at <= len(found):
            found = [found[self.at - 1]]
        elif not found or (len(found) != 1 and not self.every):
            raise PlaceError(f"{self}: stands there {len(found)} times")
        for match in reversed(found):
            parts = self.put.split("...")
            kept = [text[slice(*match.span(n))] for n in range(1, len(parts))]
            new = "".join(part for pair in zip(parts, [*kept, ""], strict=True) for part in pair)
            text = text[: match.start()] + new + text[match.end() :]
        return text

    def apply_to(self, files: Iterable[Path]) -> tuple[Path, str]:
        """The one of these files that holds the place, and its text with the fault."""
        texts = {file: file.read_text("utf-8") for file in files}
        holding = [file for file, text in texts.items() if self.matches(text)]
        if len(holding) != 1:
            raise PlaceError(f"{self}: is in {[file.name for file in holding]}, expected one file")
        return holding[0], self.apply(texts[holding[0]])

    def matches(self, text: str) -> list[re.Match[str]]:
        """Where the tokens stand in the place, comments blanked, in order."""
        code = COMMENT.sub(_blank, text)
        found = {
            match.start(): match
            for start, end in places(text, self.place)
            for match in _pattern(self.find).finditer(code, start, end)
        }
        return [found[start] for start in sorted(found)]


def table(name: str) -> dict[str, Any]:
    """The edits of a file of this folder, in their sections where it has some."""

    def made(found: Any) -> Any:
        if isinstance(found, dict):
            return {what: made(one) for what, one in found.items()}
        return Edit(*found[:3], **(found[3] if len(found) > 3 else {}))

    return made(tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text("utf-8")))


def places(text: str, place: str) -> list[tuple[int, int]]:
    """The spans of the bodies (overloads have one each), of the marked line, or of everything."""
    if not place:
        return [(0, len(text))]
    if place.startswith("//"):
        return [m.span() for m in re.finditer(r"[^\n]+", text) if m[0].endswith(place)]
    code = LITERAL.sub(_blank, COMMENT.sub(_blank, text))
    scopes = [(m[1], *_block(code, m.end() - 1)) for m in SCOPE.finditer(code)]
    found = []
    for name, start, end in (*scopes, *_functions(code)):
        outer = [scope for scope, first, last in scopes if first < start and end < last]
        full = "::".join((*outer, name))
        if full == place or full.endswith(f"::{place}"):
            found.append((start, end))
    return found


def _functions(code: str) -> Iterator[tuple[str, int, int]]:
    for head in HEAD.finditer(code):
        if head[1] in NOT_FUNCTIONS:
            continue
        _, end = _block(code, head.end() - 1)
        if body := AFTER.match(code, end):
            yield (head[1], *_block(code, body.end() - 1))


def _block(code: str, start: int) -> tuple[int, int]:
    """From an opening bracket past the closing one; to the end of the text where none closes."""
    opening = code[start]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    for match in re.compile(f"[{opening}{closing}]").finditer(code, start):
        depth += 1 if match[0] == opening else -1
        if depth == 0:
            return start, match.end()
    return start, len(code)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _pattern(find: str) -> re.Pattern[str]:
    tokens = TOKEN.findall(find)
    parts = [r"([^;{}]*?)" if token == "..." else re.escape(token) for token in tokens]
    text = ""
    for index, part in enumerate(parts):
        if index:
            both_words = re.match(r"\w", tokens[index]) and re.match(r"\w", tokens[index - 1])
            text += r"\s+" if both_words else r"\s*"
        text += part
    first = r"(?<!\w)" if re.match(r"\w", tokens[0]) else ""
    last = r"(?!\w)" if re.match(r"\w", tokens[-1]) else ""
    return re.compile(first + text + last)
