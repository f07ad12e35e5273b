"""Read metal/: the table of kernels, and the bodies with their flags.

A body is Metal text with lines `#if flag`, `#if !flag`, `#else` and `#endif`
for the flags and traits of variants.toml. No other syntax of the preprocessor
is allowed there. The result is a list of segments, each with the flags and
traits that it needs, so that any language can build a kernel by joining the
segments that apply.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

# C compilers need not accept string literals longer than this.
LONGEST_SEGMENT = 4000

# The attention operation that takes every numeric option.
MOST_NUMBERS = "scaled_dot_product_attention_quantized_with_scores"


class KernelSourceError(Exception):
    """The text in metal/ breaks a rule of the dialect; the message says where."""


@dataclass(frozen=True)
class Segment:
    """Text that is part of a variant when `condition` holds.

    The condition is a list of flags and traits separated by spaces, all of which must
    be on, or off if a "!" precedes it. An empty condition always holds.
    """

    condition: str
    text: str


@dataclass(frozen=True)
class Buffer:
    """An input, output or template argument of a kernel, there when `condition` holds."""

    name: str
    condition: str


@dataclass(frozen=True)
class Family:
    """Kernels that share a body. Conditions name flags, and the traits that tell them apart."""

    name: str
    template: tuple[Buffer, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    segments: tuple[Segment, ...]
    kernels: dict[str, tuple[str, ...]]
    """Traits and flags that are always on, by kernel."""


@dataclass(frozen=True)
class KernelTable:
    """Everything the generated files hold."""

    flags: tuple[str, ...]
    traits: tuple[str, ...]
    exclusive: tuple[tuple[str, ...], ...]
    header: tuple[Segment, ...]
    cuda_shim: tuple[Segment, ...]
    families: tuple[Family, ...]


def read_table(metal: Path) -> KernelTable:
    """Read variants.toml in the folder `metal` and the files that it names."""
    table = tomllib.loads((metal / "variants.toml").read_text("ascii"))
    flags, traits = tuple(table["flags"]), tuple(table["traits"])
    numbers = _numbers(metal / "operations.toml")
    terms = (*flags, *traits, *numbers)
    families = []
    for name, family in table["families"].items():
        segments: list[Segment] = []
        for source in family["source"]:
            for segment in resolve_flags(_read_lines(metal / source), terms):
                _append(segments, segment.condition, segment.text)
        kernels = {kernel: tuple(own) for kernel, own in family["kernels"].items()}
        for kernel, own in kernels.items():
            if unknown := set(own) - set(terms):
                raise KernelSourceError(f"variants.toml: {kernel} has unknown traits {unknown}")
        sides = (_buffers(family[side], terms) for side in ("template", "inputs", "outputs"))
        families.append(Family(name, *sides, _split_long(segments), kernels))
    named = {term.lstrip("!") for f in families for s in f.segments for term in s.condition.split()}
    return KernelTable(
        flags=(*flags, *(number for number in numbers if number in named)),
        traits=traits,
        exclusive=tuple(tuple(group) for group in table["exclusive"]),
        header=_plain_segments(metal / table["header"]),
        cuda_shim=_plain_segments(metal / table["cuda_shim"]),
        families=tuple(families),
    )


def own_flags(table: KernelTable, family: Family, kernel: str) -> tuple[str, ...]:
    """The flags that make a difference to a kernel, in the order of the table."""
    on = family.kernels[kernel]
    known, found = {*table.traits, *on}, set()
    for part in (*family.inputs, *family.outputs, *family.segments):
        terms = {term.lstrip("!"): not term.startswith("!") for term in part.condition.split()}
        if all((term in on) == wanted for term, wanted in terms.items() if term in known):
            found |= terms.keys() - known
    return tuple(flag for flag in table.flags if flag in found)


def _numbers(path: Path) -> tuple[str, ...]:
    """The numeric options of attention: one that is not 0 sets a flag, if a body tests it."""
    if not path.exists():
        return ()
    operation = tomllib.loads(path.read_text("ascii"))[MOST_NUMBERS]
    return tuple(n for n, given in operation.items() if "number" in given and n != "scale")


def resolve_flags(lines: list[tuple[str, str]], flags: tuple[str, ...]) -> list[Segment]:
    """Flatten `#if` lines over `flags` into segments; `lines` are (place, text)."""
    segments: list[Segment] = []
    open_conditions: list[tuple[str, bool]] = []  # flag (maybe with "!"), #else seen
    for place, line in lines:
        directive = line.strip()
        if not directive.startswith("#"):
            _append(segments, " ".join(term for term, _ in open_conditions), f"{line}\n")
        elif match := re.fullmatch(r"#if (!?)(\w+)", directive):
            if match[2] not in flags:
                raise KernelSourceError(f"{place}: {match[2]!r} is not a flag of variants.toml")
            open_conditions.append((match[1] + match[2], False))
        elif directive == "#else" and open_conditions and not open_conditions[-1][1]:
            term = open_conditions[-1][0]
            open_conditions[-1] = (term[1:] if term.startswith("!") else "!" + term, True)
        elif directive == "#endif" and open_conditions:
            open_conditions.pop()
        else:
            raise KernelSourceError(f"{place}: a body may not say {directive!r} here")
    if open_conditions:
        raise KernelSourceError(f"{lines[-1][0]}: #if {open_conditions[-1][0]} is never closed")
    return segments


def _append(segments: list[Segment], condition: str, text: str) -> None:
    if segments and segments[-1].condition == condition:
        segments[-1] = Segment(condition, segments[-1].text + text)
    else:
        segments.append(Segment(condition, text))


def _read_lines(path: Path) -> list[tuple[str, str]]:
    """The lines of a file that are not empty or comments, each with its place."""
    try:
        text = path.read_text("ascii")
    except UnicodeDecodeError as error:
        raise KernelSourceError(f"{path.name}: {error}; kernel text is ASCII") from error
    if "/*" in text:
        raise KernelSourceError(f"{path.name}: comments are written with //")
    stripped = (
        (number, line.split("//")[0].rstrip()) for number, line in enumerate(text.splitlines(), 1)
    )
    return [(f"{path.name}:{number}", line) for number, line in stripped if line]


def _plain_segments(path: Path) -> tuple[Segment, ...]:
    return _split_long([Segment("", "".join(f"{line}\n" for _, line in _read_lines(path)))])


def _split_long(segments: list[Segment]) -> tuple[Segment, ...]:
    pieces: list[Segment] = []
    for segment in segments:
        piece = ""
        for line in segment.text.splitlines(keepends=True):
            if len(piece) + len(line) > LONGEST_SEGMENT:
                pieces.append(Segment(segment.condition, piece))
                piece = ""
            piece += line
        pieces.append(Segment(segment.condition, piece))
    return tuple(pieces)


def _buffers(entries: list[dict[str, str]], flags: tuple[str, ...]) -> tuple[Buffer, ...]:
    buffers = tuple(Buffer(entry["name"], entry.get("when", "")) for entry in entries)
    for buffer in buffers:
        for term in buffer.condition.split():
            if term.removeprefix("!") not in flags:
                raise KernelSourceError(
                    f"variants.toml: {term!r} of buffer {buffer.name!r} is not a flag"
                )
    return buffers
