"""`mlx_h2o plan`: what a model's KV cache takes, what fits into a memory, and the command for it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..lm.plan import Outline, configs, outline_of, outlined
from ..lm.prompt_cache import make_prompt_cache
from ..lm.sizing import least_rows, most_rows
from ..policies.h2o import H2O
from ..serving.memory import COPIED, Memory, machine_bytes
from .parsing import OneLineParser, nbytes, number

_FORMATS: dict[str, dict[str, Any]] = {
    "unquantised": {},
    "8 bits": {"kv_bits": 8},
    "8 and 5 bits": {"kv_bits": 8, "v_bits": 5},
    "turbo3": {"kv_format": "turbo3"},
}
"""Rows as they are stored."""
_FEW = "8 and 5 bits"
"""Of keys and values, where the errors of a model are not known; a budget in bytes measures them when
the model is loaded."""
_PARTS = (1, 4, 8, 16)
"""Which part of the tokens stay: all, or one in so many."""
_LENGTHS = {"8K": 1 << 13, "32K": 1 << 15, "128K": 1 << 17}
_LONGEST = 1 << 30
_STEP = 2048


def run(arguments: Sequence[str]) -> int:
    """Say what a model takes and what fits; the exit status, 1 where it is refused."""
    parser = OneLineParser(
        "plan",
        "Say what the KV cache of a model takes, what fits into a memory, and the command that runs "
        "it: from its settings and the header of its weights, without loading it.",
        usage="%(prog)s MODEL [options]",
    )
    parser.add_argument(
        "model", nargs="?", help="a directory, a name on the hub or of the table, or demo"
    )
    parser.add_argument("--memory", type=nbytes, metavar="BYTES",
        help="such as 24GB (default: three quarters of this machine's)")  # fmt: skip
    parser.add_argument("--context", type=_tokens, metavar="TOKENS",
        help="of a sequence, such as 128K (default: what the model is made for)")  # fmt: skip
    parser.add_argument("--concurrency", type=number(1), default=1, metavar="N",
        help="sequences at a time (default: 1)")  # fmt: skip
    parser.add_argument("--table", action="store_true", help="models that people run, in a table")
    args = parser.parse_args(arguments)
    if args.table == (args.model is not None):
        parser.error("expected a MODEL, or --table")
    if args.table:
        print(table())
        return 0
    outline = outline_of(args.model)
    context = args.context or outline.context or _LENGTHS["32K"]
    print("\n".join(_facts(args.model, outline)))
    if outline.refused:
        return 1
    print("\n".join(_fits(args.model, outline, args.memory, context, args.concurrency)))
    return 0


def table() -> str:
    """What models that people run take, and whether they are served, in Markdown."""
    head = ["model", "mlx_lm's file", "layers that grow", "KB a token", *_LENGTHS, "made for"]
    rows = [[*head, "128K, a quarter of its rows", "served"]]
    for name, config in configs().items():
        outline = outlined(config)
        small = {"max_kv_size": _LENGTHS["128K"] // 4} | _FORMATS[_FEW]
        row = [
            name.rpartition("/")[2],
            outline.file,
            f"{len(outline.growing)} of {len(outline.layers)}",
            f"{outline.row / 1000:.1f}",
            *(_size(outline.nbytes(tokens)) for tokens in _LENGTHS.values()),
            f"{outline.context:,}" if outline.context else "",
            "" if outline.refused else _size(outline.nbytes(_LENGTHS["128K"], **small)),
            _served(outline),
        ]
        rows.append(row)
    left = {0, 1, len(rows[0]) - 1}
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width if at in left else "-" * (width - 1) + ":" for at, width in enumerate(widths)]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        padded = (c.ljust(w) if at in left else c.rjust(w) for at, (c, w) in enumerate(cells))
        return f"| {' | '.join(padded)} |"

    return "\n".join(map(line, [rows[0], rule, *rows[1:]]))


def _facts(name: str, outline: Outline) -> Iterator[str]:
    """What the model keeps, and whether it is served."""
    context = f", made for {outline.context:,} tokens" if outline.context else ""
    yield f"{name}: {outline.file}{context}, weights of {_size(outline.weights)}"
    growing, count = outline.growing, len(outline.layers)
    which = f": {_few(growing)}" if 0 < len(growing) < count else ""
    parts = [one for parts in outline.layers for one in parts]
    rest = sum(one.nbytes(one.most or 1) for one in parts if not one.grows)
    more = f"; beside them {_size(rest)} that do not" if rest else ""
    yield f"layers     {len(growing)} of {count} grow{which}{more}"
    lengths = _LENGTHS | ({f"{outline.context:,}": outline.context} if outline.context else {})
    sizes = (f"{_size(outline.nbytes(tokens))} at {at}" for at, tokens in lengths.items())
    dtypes = ", ".join(dict.fromkeys(one.dtype for one in parts if one.grows))
    yield f"KV cache   {_size(outline.row)} a token in {dtypes}: {', '.join(sizes)}"
    yield f"served     {_served(outline)}"


def _served(outline: Outline) -> str:
    """Whether the caches here serve a model, and how."""
    if outline.refused:
        why = outline.refused.partition("cannot be served: ")[2] or outline.refused
        return f"refused: {re.split(', expected|. Expected', why)[0]}"
    if not outline.scored:
        return "policies without scores: its own attention gives none"
    missing = [name for name in _FORMATS if _held(outline, name, 4) is None]
    return f"yes, without {', '.join(missing)}" if missing else "yes"


def _held(outline: Outline, stored: str, part: int, context: int = 1 << 15) -> int | None:
    """Bytes behind so many tokens, where one in ``part`` of them stays; None where the model has no
    rows of this format."""
    if part == 1 and not _FORMATS[stored]:
        return outline.nbytes(context)
    try:
        rows = None if part == 1 else context // part
        return outline.nbytes(context, max_kv_size=rows, **_settings(outline, stored))
    except ValueError:
        return None


def _settings(outline: Outline, stored: str) -> dict[str, Any]:
    folds = bool(_FORMATS[stored]) and outline.scored
    return {**_FORMATS[stored], **({"policy": H2O.name} if folds else {})}


def _fits(
    name: str, outline: Outline, memory: int | None, context: int, count: int
) -> Iterator[str]:
    """How many sequences fit, what each of ``count`` gets, and the command."""
    limit = memory or machine_bytes() * 3 // 4

    def make() -> list[list[Any]]:
        model: Any = outline
        return [make_prompt_cache(model, _STEP, layers="equal")]

    free = Memory([outline], make, limit, _STEP, 1, count).free
    yield f"memory     {_size(limit)}, of which caches may have {_size(free)}"
    yield ""
    columns = ["all", *(f"1/{part}" for part in _PARTS[1:])]
    yield f"{f'sequences of {context:,} tokens, rows kept':44}{_cells(columns)}"
    for stored in _FORMATS:
        sizes = [_held(outline, stored, part, context) for part in _PARTS]
        cells = ["-" if size is None else f"{_sequences(free, size):,}" for size in sizes]
        yield f"  {stored:42}{_cells(cells)}"
    yield ""
    each = free if count == 1 else int(free / COPIED) // count
    yield f"{'It gets' if count == 1 else f'Each of {count} gets'} {_size(each)}: " + (
        said := _chosen(outline, context, each)
    )
    rows = "--max-kv-size none" if said == _ALL else f"--max-kv-bytes {each // 10**6}MB"
    served = f" --memory {limit // 10**6}MB --decode-concurrency {count} --prompt-concurrency 1"
    command = "chat" if count == 1 else "server"
    yield f"  mlx_h2o {command} --model {name} {rows}{served if count > 1 else ''}"


_ALL = "all rows, unquantised."


def _chosen(outline: Outline, context: int, limit: int) -> str:
    """The rows that a sequence has in so many bytes, and their bits."""
    if outline.nbytes(context) <= limit:
        return _ALL
    fewest = _held(outline, _FEW, 1, context)
    stored = "unquantised" if fewest is None else _FEW
    if fewest is not None and fewest <= limit:
        return "all rows, in the fewest bits that cost nothing."
    settings = _settings(outline, stored)
    rows = most_rows(
        lambda rows: outline.nbytes(context, max_kv_size=rows, **settings),
        least_rows(settings), limit, name="[plan] what --memory leaves for a sequence",
    )  # fmt: skip
    return f"{rows:,} rows a head ({stored}), one for {context / rows:.1f} tokens."


def _sequences(free: int, size: int) -> int:
    """Of so many bytes each; one alone is not copied."""
    return max(int(free / (COPIED * size)), int(size <= free))


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>9}" for cell in cells)


def _few(layers: Sequence[int]) -> str:
    """The first of them, and the last."""
    said = [f"{at}" for at in layers]
    return ", ".join(said if len(said) < 8 else [*said[:4], "...", said[-1]])


def _size(count: float) -> str:
    """Bytes as people write them."""
    for unit, power in (("GB", 9), ("MB", 6)):
        if count >= 10**power:
            return f"{count / 10**power:,.1f} {unit}"
    return f"{count / 1000:,.1f} KB"


def _count(text: str) -> int:
    found = re.fullmatch(r"\s*(\d+)\s*([KM]?)\s*", text.upper())
    return int(found[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[found[2]] if found else 0


def _tokens(text: str) -> int:
    """A type of argparse: a number of tokens, such as 128K."""
    count = _count(text)
    if not 1 <= count <= _LONGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens, expected one such as 32768 or 128K"
        )
    return count
