"""Checks of the arguments of operations, from the table that metal/operations.toml is.

Every error is raised here or in ``fast``, before a back end is chosen, so that all of them refuse
the same calls with the same words. A wrong type is a TypeError; a wrong
value, ValueError.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from mlx_h2o.operations._operation_table import OPERATIONS

Number = TypeVar("Number", int, float)
StreamLike = mx.Stream | mx.Device | None
Shape = tuple[int, ...]
Known = dict[str, Any]
"""Sizes and dtypes by the names that the table has for them."""

FLOATS: tuple[mx.Dtype, ...] = (mx.float32, mx.float16, mx.bfloat16)
_FLOAT_NAMES = "float32, float16 or bfloat16"
CODE_SIZES = (32, 1024)
"""Rows of codes have a power of two of elements, from the first to the second."""

_QUANTIZED = OPERATIONS["scaled_dot_product_attention_quantized_with_scores"]
BITS: tuple[int, ...] = tuple(_QUANTIZED["bits"]["one_of"])
GROUP_SIZES: tuple[int, ...] = tuple(_QUANTIZED["group_size"]["one_of"])
CODE_BITS: tuple[int, ...] = tuple(OPERATIONS["encode_rows"]["bits"]["one_of"])

NUMBERS = tuple(name for name, given in _QUANTIZED.items() if "number" in given and name != "scale")
"""The numbers of attention beside its scale, which are off at 0."""

_INT32 = 2**31 - 1
_FLOAT32 = float(mx.finfo(mx.float32).max)


class Array(NamedTuple):
    """An array of the table."""

    name: str
    kind: str
    dtype: str
    layout: str
    names: tuple[str, ...]
    optional: bool
    scales: str
    bits: str


@cache
def _arrays(op: str) -> tuple[Array, ...]:
    found = []
    for name, given in OPERATIONS[op].items():
        for kind in ("array", "mask", "rows"):
            if name != "sizes" and kind in given:
                dtype, _, layout = given[kind].partition(" ")
                names = tuple(layout[1:-1].split(", "))
                more = "default" in given, given.get("scales", ""), given.get("bits", "")
                found.append(Array(name, kind, dtype, layout, names, *more))
    return tuple(found)


def sizes(op: str, *given: Any, **packing: int) -> Known:
    """The sizes, by name, of the arrays of an operation, in the order of the table; None for those
    that are not there, and a tuple for rows in parts. ``packing`` has the bits and the group size
    of rows.

    Raises ValueError where they do not fit the table, and TypeError where one is no array.
    """
    key = [
        (hash(each.dtype), each.shape) if isinstance(each, mx.array)
        else None if each is None else _signature(op, at, each)
        for at, each in enumerate(given)
    ]  # fmt: skip
    return _sizes(op, tuple(key), *packing.items())


def _signature(op: str, at: int, given: Any) -> Any:
    """Dtypes and shapes of what is not one array."""
    expected = _arrays(op)[at]
    if not isinstance(given, tuple):
        array(op, expected.name, given)
    parts = zip(_parts_of(expected.name, len(given)), given, strict=True)
    return tuple((hash(part.dtype), part.shape) for part in (array(op, *named) for named in parts))


@lru_cache(maxsize=512)
def _sizes(op: str, given: tuple[Any, ...], *packing: tuple[str, int]) -> Known:
    """Once for what is right, since this runs once per layer and token."""
    given = tuple(_with_dtypes(found) for found in given)
    known: Known = dict(packing)
    rules = [rule.split() for rule in OPERATIONS[op].get("sizes", ())]
    for expected, found in zip(_arrays(op), given, strict=True):
        if found is None:
            if not expected.optional:
                array(op, expected.name, None)
            continue
        if expected.kind == "mask":
            _check_mask(op, expected, found[0], found[1], known)
        elif isinstance(found[0], tuple):
            _check_parts(op, expected, found, known, rules)
        else:
            _match(op, expected, found[0], found[1], known, rules)
    return known


_DTYPES: dict[int, mx.Dtype] = {
    hash(dtype): dtype for dtype in vars(mx).values() if isinstance(dtype, mx.Dtype)
}
"""By their hashes, which compare faster."""


def _with_dtypes(found: Any) -> Any:
    if found is None or isinstance(found[0], tuple):
        return found and tuple(map(_with_dtypes, found))
    return _DTYPES[found[0]], found[1]


def _match(
    op: str, expected: Array, dtype: mx.Dtype, shape: Shape, known: Known, rules: list[list[str]]
) -> None:
    """Whether one array is as expected; its sizes are known from then on."""
    new: Known = dict(zip(expected.names, shape, strict=False)) | known
    fits = len(shape) == len(expected.names) and dtype_name(dtype) in _dtypes(expected, known)
    fits = fits and all(
        size == new[name] and size > 0 for name, size in zip(expected.names, shape, strict=True)
    )
    if not fits or not all(_holds(rule, new) for rule in rules):
        raise ValueError(f"[{op}] {_found(expected, dtype, shape)}{_words(expected, known, rules)}")
    known |= new
    known.setdefault(expected.dtype, dtype_name(dtype))


def _dtypes(expected: Array, known: Known) -> tuple[str, ...]:
    floats = tuple(map(dtype_name, FLOATS))
    name = expected.dtype
    if name == "F" or (name in ("T", "S", "U") and name not in known):
        return floats
    return ("bool", *floats) if name == "bool|F" else (known.get(name, name),)


def _holds(rule: list[str], known: Known) -> bool:
    """Whether a rule holds, or is about sizes that are not known yet."""
    first, relation, second = rule[0], rule[1], rule[-1]
    one, other = known.get(first), int(second) if second.isdigit() else known.get(second)
    if one is None or other is None:
        return True
    if relation == "divides":
        return bool(other % one == 0)
    return bool(one < other) if relation == "below" else bool(one <= other)


def _found(expected: Array, dtype: mx.Dtype, shape: Shape) -> str:
    name = expected.name.replace("_", " ") if expected.name.startswith("new_") else expected.name
    several = name.endswith("s") and not name.endswith(("ss", "bias"))
    return f"{name} {'are' if several else 'is'} {dtype_name(dtype)} {shape}, expected "


def _words(expected: Array, known: Known, rules: list[list[str]]) -> str:
    """What an array was expected to be, with all that is known of it."""
    allowed = _dtypes(expected, known)
    text = " or ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1]))) + f" {expected.layout}"
    free = [name for name in expected.names if name not in known]
    if len(free) < len(expected.names):
        shown = ", ".join(str(known.get(name, name)) for name in expected.names)
        text += f" = ({shown}{',' if len(expected.names) == 1 else ''})"
    notes = ["every size at least 1"] if free else []
    for first, relation, *_, second in rules:
        limit = f"{second} = {known[second]}" if second in known else second
        if first in free and (second in known or second.isdigit()):
            words = {"divides": "a divisor of", "below": "below"}.get(relation, "at most")
            notes.append(f"{first} {words} {limit}")
        elif second in free and first in known:
            notes.append(f"{second} a multiple of {first} = {known[first]}")
    return ", ".join([text, *notes]) + "."


def _check_mask(op: str, expected: Array, dtype: mx.Dtype, shape: Shape, known: Known) -> None:
    full = tuple(known[name] for name in expected.names)
    last = full[len(full) - len(shape) :]
    broadcasts = len(shape) <= len(full) and all(
        size in (1, most) for size, most in zip(shape, last, strict=True)
    )
    if not broadcasts or (dtype != mx.bool_ and dtype not in FLOATS):
        raise ValueError(
            f"[{op}] {_found(expected, dtype, shape)}bool, {_FLOAT_NAMES} that broadcasts to "
            f"{expected.layout} = {full}."
        )


def _parts_of(name: str, count: int) -> tuple[str, ...]:
    """What parts of rows are called."""
    one = name.removesuffix("s")
    words = ("words", "norms") if count == 2 else ("words", "scales", "biases")
    return (name,) if count == 1 else tuple(f"{one} {word}" for word in words)


def _check_parts(
    op: str,
    expected: Array,
    found: tuple[tuple[mx.Dtype, Shape], ...],
    known: Known,
    rules: list[list[str]],
) -> None:
    """Whether the parts of rows fit each other, and the sizes that are known."""
    bits, group_size, width = known[expected.bits], known.get("group_size"), expected.names[3]
    if len(found) == 1:
        _match(op, expected, *found[0], known, rules)
        return
    codes = len(found) == 2
    of_words = f"{width} * {expected.bits} / 32"
    if width in known:
        size = known[width]
        _check_width(op, expected.name, size, f"{size} elements", bits, codes, known)
        known[of_words] = size * bits // 32
    lasts = (of_words, "1") if codes else (of_words, *[f"{width} / group_size"] * 2)
    dtypes = ("uint32", "float32") if codes else ("uint32", *[expected.scales] * 2)
    known["1"] = 1
    for name, dtype, last, part in zip(
        _parts_of(expected.name, len(found)), dtypes, lasts, found, strict=True
    ):
        names = (*expected.names[:3], last)
        spec = expected._replace(
            name=name, dtype=dtype, names=names, layout=f"[{', '.join(names)}]"
        )
        _match(op, spec, *part, known, rules)
        if last == of_words:
            words = known[of_words]
            size = -1 if words * 32 % bits else words * 32 // bits
            _check_width(op, expected.name, size, f"{words} words", bits, codes, known)
            known[width] = size
            if group_size and not codes:
                known[f"{width} / group_size"] = size // group_size


def _check_width(
    op: str, name: str, size: int, found: str, bits: int, codes: bool, known: Known
) -> None:
    group_size = known.get("group_size", 1)
    if codes and (bits not in CODE_BITS or not codes_fit(size)):
        raise ValueError(
            f"[{op}] {name} have {found} per row and codes of {bits} bits, expected a power of two "
            f"of elements from {CODE_SIZES[0]} to {CODE_SIZES[1]}, and 2, 3 or 4 bits."
        )
    if not codes and (size < 0 or size % group_size):
        raise ValueError(
            f"[{op}] {name} have {found} per row of {bits} bits, expected a multiple of "
            f"group_size = {group_size} elements."
        )


def codes_fit(size: int) -> bool:
    """Whether rows of this many elements can be kept as codes."""
    return CODE_SIZES[0] <= size <= CODE_SIZES[1] and size & (size - 1) == 0


def array(op: str, name: str, value: object) -> mx.array:
    """``value``, if it is an array of MLX."""
    if not isinstance(value, mx.array):
        raise TypeError(f"[{op}] {name} must be an mlx.core.array, found {type(value).__name__}.")
    return value


def whole(op: str, name: str, value: object) -> int:
    """``value`` as an int; NumPy's integers are welcome, bools are no numbers."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"[{op}] {name} must be an integer, found {type(value).__name__}.")
    return int(value)


def integer(op: str, name: str, value: object, known: Mapping[str, int] | None = None) -> int:
    """The same within its bounds."""
    return _bounded(op, name, whole(op, name, value), known)


def number(op: str, name: str, value: object) -> float:
    """``value`` as a float that is finite in float32 and within its bounds."""
    # The first test is for speed: this runs once per layer and token.
    if type(value) is not float and (
        isinstance(value, bool) or not isinstance(value, numbers.Real)
    ):
        raise TypeError(f"[{op}] {name} must be a number, found {type(value).__name__}.")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    # Every back end holds it in float32.
    if not abs(found) <= _FLOAT32:
        raise ValueError(f"[{op}] {name} is {found}, expected a finite number.")
    return _bounded(op, name, found)


_RELATIONS: tuple[tuple[str, str, Callable[[float, float], bool]], ...] = (
    ("least", "at least", lambda found, limit: found >= limit),
    ("above", "above", lambda found, limit: found > limit),
    ("most", "at most", lambda found, limit: found <= limit),
    ("below", "below", lambda found, limit: found < limit),
)


@cache
def _bounds(op: str, name: str) -> tuple[tuple[str, Any, Callable[[float, float], bool]], ...]:
    for key, given in OPERATIONS[op].items():
        found = None if key == "sizes" else given.get("number", given.get("integer"))
        if found is not None and name in (key, given.get("python")):
            return tuple((words, found[k], holds) for k, words, holds in _RELATIONS if k in found)
    raise KeyError(name)


def _bounded(op: str, name: str, found: Number, known: Mapping[str, int] | None = None) -> Number:
    bounds = _bounds(op, name)
    for _, limit, holds in bounds:
        if not holds(found, known[limit] if known and limit in known else limit):
            break
    else:
        return found
    limits = [
        f"{words} {limit} = {known[limit]}" if known and limit in known else f"{words} {limit}"
        for words, limit, _ in bounds
    ]
    raise ValueError(f"[{op}] {name} is {found}, expected {' and '.join(limits)}.")


def one_of(op: str, name: str, value: Any) -> Any:
    """``value``, if it is one of those of the table."""
    known = tuple(OPERATIONS[op][name]["one_of"])
    if isinstance(known[0], int):
        value = whole(op, name, value)
    if value not in known:
        raise ValueError(f"[{op}] {name} is {value!r}, expected one of {known}.")
    return value


def packing(op: str, bits: object, v_bits: object, group_size: object) -> dict[str, int]:
    """Bits of the keys and of the values, and the group size, of packed rows."""
    found = {"bits": one_of(op, "bits", bits)}
    found["v_bits"] = found["bits"] if v_bits is None else one_of(op, "v_bits", v_bits)
    return found | {"group_size": one_of(op, "group_size", group_size)}


def stream(op: str, value: object) -> StreamLike:
    """``value``, if it names a place to run on; a device type becomes its device."""
    if value is None or isinstance(value, (mx.Stream, mx.Device)):
        return value
    if isinstance(value, mx.DeviceType):
        return mx.Device(value)
    raise TypeError(
        f"[{op}] stream must be None, an mlx.core.Stream or an mlx.core.Device, "
        f"found {type(value).__name__}."
    )


def device_of(stream: StreamLike) -> mx.Device:
    """The device that a call with this ``stream`` argument runs on."""
    if stream is None:
        return mx.default_device()
    return stream.device if isinstance(stream, mx.Stream) else stream


def runs_on_gpu(stream: StreamLike) -> bool:
    """Whether a call with this ``stream`` argument runs on a GPU."""
    return bool(device_of(stream).type == mx.DeviceType.gpu)


def dtype_name(dtype: mx.Dtype) -> str:
    """``mlx.core.float16`` is ``float16`` in messages, and ``mlx.core.bool`` ``bool``."""
    return str(dtype).removeprefix("mlx.core.")


def zones(
    op: str, sink_size: object, recent_start: object, batch: int
) -> tuple[int, int | mx.array | None]:
    """The protected zones. Positions end far below: a limit outside int32 says the same as the
    nearest inside."""
    sinks = min(integer(op, "sink_size", sink_size), _INT32)
    if recent_start is None:
        return sinks, None
    if isinstance(recent_start, mx.array):
        if recent_start.dtype != mx.int32 or recent_start.shape not in ((), (batch,)):
            raise ValueError(
                f"[{op}] recent_start is {dtype_name(recent_start.dtype)} {recent_start.shape}, "
                f"expected an integer, or int32 () or [B] = ({batch},)."
            )
        return sinks, recent_start
    return sinks, max(-_INT32, min(whole(op, "recent_start", recent_start), _INT32))
