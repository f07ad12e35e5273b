"""`mlx_h2o plan`: what a model's KV cache takes, what fits into a memory, and how to run it."""

import argparse
import re
from collections.abc import Iterator
from functools import partial
from shlex import quote
from typing import Any, cast

from ..caches.cache import PROMPT_CHUNK
from ..errors import LARGEST, SettingError
from ..evaluation.report import markdown
from ..lm.plan import Plan, configs, outline_of, outlined
from ..lm.prompt_cache import fit_bytes, make_prompt_cache
from ..lm.routing import calls_attention
from ..policies.h2o import H2O
from ..serving.memory import COPIED, Memory, usual_bytes
from .flags import add_flags
from .parsing import OneLineParser, Shows, number

FEW_BITS = "8 and 5 bits"
"""For keys and values of a model that is not loaded. ``--max-kv-bytes`` measures which bits suffice
once it is."""
FORMATS: dict[str, dict[str, Any]] = {
    "unquantised": {}, "8 bits": {"kv_bits": 8}, FEW_BITS: {"kv_bits": 8, "v_bits": 5},
    "turbo3": {"kv_format": "turbo3"},
}  # fmt: skip
_PARTS = {"all": 1, "1/4": 4, "1/8": 8, "1/16": 16}
"""Share of rows that stay: one for this many tokens."""
CONTEXTS = {"8K": 1 << 13, "32K": 1 << 15, "128K": 1 << 17}


def parser() -> OneLineParser:
    found = OneLineParser(
        "Show how large the KV cache of a model is, what fits into memory, and the command to run, "
        "from its settings and the header of its weights, without loading it.",
        usage="%(prog)s MODEL [options]",
    )
    add, either = found.add_argument, found.add_mutually_exclusive_group(required=True).add_argument
    either("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL",
           help="a directory, a name on the hub or of docs/models.md, or demo")  # fmt: skip
    either("--model", help="the same, as in the other commands")
    add_flags(found, "memory prefill-step-size")
    add("--context", type=_tokens, metavar="TOKENS",
        help="length of a sequence, such as 128K (default: the model's context)")  # fmt: skip
    add("--concurrency", type=number(1), default=1, metavar="N", help="sequences (default: 1)")
    add("--table", action=Shows, nargs=0, const=model_table, help="show a table of popular models")
    return found


def run(args: argparse.Namespace, *_: Any) -> int:
    """Print what a model takes and what fits; returns the exit status, 1 if it is not supported."""
    outline = outline_of(args.model)
    name = outline.name or args.model
    print("\n".join(_facts(name, outline)))
    if outline.refused:
        return 1
    context = args.context or outline.context or CONTEXTS["32K"]
    limit = args.memory or usual_bytes()
    print("\n".join(_fits(name, outline, limit, context, args.concurrency, args.prefill_step_size)))
    return 0


def model_table(*_: Any) -> str:
    """A Markdown table of popular models: what they take, and whether they are supported."""
    far, rows = CONTEXTS["128K"], []
    head = ["model", "supported", "layers that grow", "KB a token", *CONTEXTS, "a quarter of 128K"]
    for name, config in configs().items():
        outline = outlined(config)
        few = None if outline.refused else _held(outline, FEW_BITS, 4, far)
        sizes = [size_of(outline.nbytes(tokens)) for tokens in CONTEXTS.values()]
        grow = f"{sum(map(bool, outline.rows))} of {len(outline.rows)}"
        own = [name.rpartition("/")[2], served(outline), grow, f"{sum(outline.rows) / 1000:.1f}"]
        rows.append([*own, *sizes, size_of(few) if few else "", f"{outline.context or 0:,}"])
    return markdown([*head, "trained on"], rows, texts=2)


def _facts(name: str, outline: Plan) -> Iterator[str]:
    """Lines about what the model's caches keep, and whether it is supported."""
    context = f", trained on {outline.context:,} tokens" if outline.context else ""
    file = type(outline.model).__module__.rpartition(".")[2]
    yield f"{name}: {file}{context}, weights of {size_of(outline.weights)}"
    grow, count = [layer for layer, row in enumerate(outline.rows) if row], len(outline.rows)
    which = f": {', '.join(map(str, grow))}" if 0 < len(grow) < count else ""
    yield f"layers that grow: {len(grow)} of {count}{which}"
    lengths = {tokens: at for at, tokens in CONTEXTS.items()}
    if outline.context:
        lengths.setdefault(outline.context, f"{outline.context:,}")
    sizes = (f"{size_of(outline.nbytes(tokens))} at {at}" for tokens, at in lengths.items())
    yield f"KV cache: {size_of(sum(outline.rows))} a token, {', '.join(sizes)}"
    yield f"supported: {served(outline)}"


def served(outline: Plan) -> str:
    """Whether our caches support a model, and how."""
    if outline.refused:
        return f"refused: {outline.refused}"
    if not calls_attention(outline.model):
        return "keydiff, window and random: its attention shows no scores"
    missing = [name for name in FORMATS if _held(outline, name, 4, PROMPT_CHUNK) is None]
    return f"yes, without {', '.join(missing)}" if missing else "yes"


def _settings(outline: Plan, stored: str) -> dict[str, Any]:
    folds = {"policy": H2O.name} if FORMATS[stored] and calls_attention(outline.model) else {}
    return FORMATS[stored] | folds


def _held(outline: Plan, stored: str, part: int, context: int) -> int | None:
    """Bytes after this many tokens if one row in ``part`` stays; None if the model cannot have rows
    of this format."""
    try:
        rows = None if part == 1 else context // part
        return outline.nbytes(context, max_kv_size=rows, **_settings(outline, stored))
    except ValueError:
        return None


def _fits(
    name: str, outline: Plan, limit: int, context: int, count: int, step: int
) -> Iterator[str]:
    """How many sequences fit, what each of ``count`` gets, and the command."""
    stored = "unquantised" if _held(outline, FEW_BITS, 1, context) is None else FEW_BITS
    most = {"max_kv_size": max(context, step, 8), "layers": "equal"}  # more than the sinks
    make = partial(make_prompt_cache, cast(Any, outline), **_settings(outline, stored) | most)
    try:
        memory = Memory([outline], make, limit, decode=count, prompts=1, step=step)
    except ValueError as error:  # the rest names flags of the server
        raise ValueError(str(error).partition(" (")[0]) from error
    free, read = memory.free, size_of(memory.reserved)
    yield f"memory: {size_of(limit)}, of which {read} to read prompts, {size_of(free)} for caches\n"
    rows = []
    for form in FORMATS:
        sizes = [_held(outline, form, part, context) for part in _PARTS.values()]
        rows.append([form, *("-" if size is None else _many(free, size) for size in sizes)])
    yield markdown([f"sequences of {context:,} tokens, by rows that stay", *_PARTS], rows)
    each = free if count == 1 else int(free / COPIED) // count
    if outline.nbytes(context) <= each:
        kept, flags = "all rows, unquantised", "--max-kv-size none"
    else:
        kept, flags = _kept(outline, stored, context, each), f"--max-kv-bytes {each // 10**6}MB"
    yield f"\n{size_of(each)} for {'it' if count == 1 else f'each of {count}'}: {kept}"
    command = "chat" if outline.chats else "generate"
    if count > 1:
        command = "server"
        flags += f" --memory {limit // 10**6}MB --decode-concurrency {count} --prompt-concurrency 1"
    flags += f" --prefill-step-size {step}" if step != PROMPT_CHUNK else ""
    yield f"mlx_h2o {command} --model {quote(name)} {flags}"


def _many(free: int, size: int) -> str:
    """How many sequences of this size fit: a single one is not copied."""
    return f"{max(int(free / (COPIED * size)), int(size <= free)):,}"


def _kept(outline: Plan, stored: str, context: int, limit: int) -> str:
    """The rows that a sequence keeps in this many bytes, and their bits, in words."""
    if (_held(outline, stored, 1, context) or limit + 1) <= limit:
        return "all rows, in as many bits as fit"
    settings: dict[str, Any] = {"kv_bits": None, "layers": "equal"} | FORMATS[stored]
    try:
        config = fit_bytes(cast(Any, outline), limit, length=context, **settings).config
    except SettingError as error:
        raise ValueError(error.told(lambda _: "what --memory leaves for a sequence")) from error
    rows = config.max_kv_size or context
    return f"{rows:,} rows a head in {stored}, one for every {context / rows:.1f} tokens"


def size_of(count: float) -> str:
    """Bytes as people write them."""
    unit, power = ("GB", 9) if count >= 1e9 else ("MB", 6) if count >= 1e6 else ("KB", 3)
    return f"{count / 10**power:,.1f} {unit}"


def _tokens(text: str) -> int:
    """A type of argparse: a number of tokens, such as 128K."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*([KM]?)\s*", text.upper())
    count = int(found[1]) << {"": 0, "K": 10, "M": 20}[found[2]] if found else 0
    if not 1 <= count <= LARGEST:
        said = f"{text!r} is not a number of tokens, expected e.g. 32768 or 128K"
        raise argparse.ArgumentTypeError(said)
    return count
