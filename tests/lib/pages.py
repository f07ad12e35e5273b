"""The README and the documents: their pages, and the blocks of code on them."""

import ast
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from paths import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PAGES += [ROOT / room / "README.md" for room in ("core", "metal", "tests")]
SESSIONS = {
    node.name: ast.get_docstring(node)
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.decorator_list
}
"""The sessions of nox and their docstrings."""

_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A block of code: its place, language and text, why it is not run, and its expected output."""

    page: str
    line: int
    language: str
    text: str
    reason: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of a page. A block of ``text`` is the output of the block before it.

    Raises ValueError for a block of output that follows no code, for a block without a language,
    and for code that is indented instead of fenced, which has no language either.
    """
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text"))
        language, code = match["language"], match["text"]
        between, end = text[end : match.start()], match.end()
        if not language:
            raise ValueError(f"{page}:{line} has no language")
        if language == "text":
            if not found or between.strip():
                raise ValueError(f"{page}:{line} is the output of no block")
            found[-1] = found[-1]._replace(output=code)
        else:
            found.append(Block(page, line, language, code, match["reason"] or "", None))
    if indented := re.search(r"(?:\n\n|\A)    \S.*", _FENCE.sub("", text)):
        raise ValueError(f"{page} has code that is indented, not fenced: {indented[0].strip()}")
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(name_of(page), page.read_text("utf-8"))]


def blocks(language: str, page: str | None = None) -> list[Block]:
    """The blocks that are to be run, from one page or all."""
    return [
        block
        for block in BLOCKS
        if block.language == language and not block.reason and page in (None, block.page)
    ]


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command in a shell block, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in line.split(" && ")]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


COMMANDS = [
    (block, words) for block in BLOCKS if block.language == "sh" for words in commands_of(block)
]
