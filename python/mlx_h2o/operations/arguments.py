"""Checks of the arguments of operations, against the table in metal/operations.toml.

Arguments are checked here or in ``fast``, before a back end is chosen, so that all back ends refuse
the same calls with the same words. A wrong type raises TypeError, a wrong value ValueError.
"""

import contextlib
import math
import numbers
import operator
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, TypeVar

import mlx.core as mx

from mlx_h2o.operations._operation_table import OPERATIONS, Argument

Number = TypeVar("Number", int, float)
StreamLike = mx.Stream | mx.Device | None
Shape = tuple[int, ...]
Known = dict[str, Any]
"""Sizes and dtypes by their names in the table."""
Bounds = tuple[tuple[str, Any], ...]

FLOATS: tuple[mx.Dtype, ...] = (mx.float32, mx.float16, mx.bfloat16)
_FLOAT_NAMES = "float32, float16 or bfloat16"
CODE_SIZES = (32, 1024)
"""Least and greatest size of rows that are kept as codes; sizes are powers of two."""

_QUANTIZED, _ENCODE = (
    {rule.name: rule for rule in OPERATIONS[op].arguments}
    for op in ("scaled_dot_product_attention_quantized_with_scores", "encode_rows")
)
AFFINE_BITS: tuple[int, ...] = _QUANTIZED["bits"].values
GROUP_SIZES: tuple[int, ...] = _QUANTIZED["group_size"].values
CODE_BITS: tuple[int, ...] = _ENCODE["bits"].values

NUMBERS = tuple(n for n, rule in _QUANTIZED.items() if rule.kind == "number" and n != "scale")
"""Numeric options of attention, without the scale; 0 turns them off."""

_ANYWHERE = contextlib.nullcontext()
_INT32 = 2**31 - 1
_FLOAT32 = float(mx.finfo(mx.float32).max)


def checked_arguments(op: str, given: dict[str, Any]) -> dict[str, Any]:
    """Check the arguments of an operation; returns them by the names of the table.

    Returned rows are an array or a tuple of parts, and "causal" is an argument of its own.

    Args:
        op: the operation.
        given: the arguments of its function in ``fast``, by the names there.

    Raises ValueError if they do not fit the table, TypeError for a wrong type.
    """
    found: dict[str, Any] = {}
    packing: dict[str, int] = {}
    signatures = []
    for rule in OPERATIONS[op].arguments:
        name, called, kind = rule.name, rule.called, rule.kind
        value = given[called] if called in given else tuple(map(given.get, called.split(", ")))
        if kind == "one_of":
            value = found["bits"] if name == "v_bits" and value is None else value
            value = _one_of(op, name, value, rule.values)
            if isinstance(value, int):
                packing[name] = value
        elif kind == "number":
            value = _number(op, name, value, rule.bounds)
        elif kind == "mask" and isinstance(value, str):
            if value != "causal":
                raise ValueError(f"[{op}] mask is {value!r}, expected 'causal', an array or None.")
            found["causal"], value = True, None
        elif kind == "rows" and isinstance(value, tuple | list):
            value = _stored(op, name, tuple(value))
        if rule.sizes:
            signatures.append(_signature(op, rule, value))
        found[name] = value
    known = _sizes(op, tuple(signatures), *packing.items())
    for rule in OPERATIONS[op].arguments:
        name, called = rule.name, rule.called
        if rule.kind == "per_sequence":
            found[name] = _per_sequence(op, called, found[name], known)
        elif rule.kind == "integer":  # limits may be sizes
            number = _bounded(op, called, whole(op, called, found[name]), rule.bounds, known)
            found[name] = min(number, _INT32)  # means the same
    return found


def _stored(op: str, name: str, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """The parts of rows, without None at the end."""
    while parts and parts[-1] is None:
        parts = parts[:-1]
    if not 1 <= len(parts) <= 3:
        raise TypeError(
            f"[{op}] {name} must be words, scales and biases, words and norms, or the rows alone, "
            f"found {len(parts)} arrays."
        )
    return parts


@cache
def _parts(rows: Argument, count: int) -> tuple[Argument, ...]:
    """The parts that rows are stored in, or an array alone."""
    if count == 1:
        return (rows,)
    (*others, width), one = rows.sizes, rows.name.removesuffix("s")
    groups = rows.scales, f"{width} / group_size"
    parts = {"words": ("uint32", f"{width} * {rows.bits} / 32")}
    parts |= {"norms": ("float32", "1")} if count == 2 else {"scales": groups, "biases": groups}
    return tuple(
        rows._replace(name=f"{one} {part}", dtype=dtype, sizes=(*others, size))
        for part, (dtype, size) in parts.items()
    )


def _signature(op: str, expected: Argument, given: Any) -> tuple[tuple[mx.Dtype, Shape], ...]:
    """Dtype and shape of each part, or of an array; empty for None."""
    if given is None and expected.optional:
        return ()
    parts = given if isinstance(given, tuple) and expected.kind == "rows" else (given,)
    pairs = zip(_parts(expected, len(parts)), parts, strict=True)
    return tuple([(array(op, part.name, one).dtype, one.shape) for part, one in pairs])


@lru_cache(maxsize=512)
def _sizes(op: str, given: tuple[Any, ...], *packing: tuple[str, int]) -> Known:
    """The sizes by name. Valid calls are cached, since this runs once per layer and token."""
    sizes = _Sizes(op, dict(packing))
    arrays = (argument for argument in OPERATIONS[op].arguments if argument.sizes)
    for expected, found in zip(arrays, given, strict=True):
        if len(found) > 1:
            sizes.take_width(expected, len(found) == 2, *found[0])
        take = sizes.take_mask if expected.kind == "mask" else sizes.take
        for part, (dtype, shape) in zip(_parts(expected, len(found)), found, strict=False):
            take(part, dtype, shape)
    return sizes.known


class _Sizes:
    """Checks the arrays of a call in turn; each has to fit the sizes known by then."""

    def __init__(self, op: str, known: Known) -> None:
        self.op, self.known = op, known
        self.rules = OPERATIONS[op].rules

    def take(self, expected: Argument, dtype: mx.Dtype, shape: Shape) -> None:
        names, known = expected.sizes, self.known
        new: Known = dict(zip(names, shape, strict=False)) | known
        fits = len(shape) == len(names) and dtype_name(dtype) in self._dtypes(expected)
        fits = fits and all(
            size == new[name] and size > 0 for name, size in zip(names, shape, strict=True)
        )
        if not fits or not all(_holds(*rule, new) for rule in self.rules):
            self._refuse(expected, dtype, shape, self._words(expected))
        known |= new
        known.setdefault(expected.dtype, dtype_name(dtype))

    def take_mask(self, expected: Argument, dtype: mx.Dtype, shape: Shape) -> None:
        full = tuple(self.known[name] for name in expected.sizes)
        pairs = zip(reversed(shape), reversed(full), strict=False)
        broadcasts = len(shape) <= len(full) and all(size in (1, most) for size, most in pairs)
        if not broadcasts or (dtype != mx.bool_ and dtype not in FLOATS):
            words = f"bool, {_FLOAT_NAMES} that broadcasts to {expected.layout} = {full}."
            self._refuse(expected, dtype, shape, words)

    def take_width(self, rows: Argument, codes: bool, dtype: mx.Dtype, shape: Shape) -> None:
        """The size of packed rows, unless it is known, follows from their words."""
        known, width, words = self.known, rows.sizes[-1], _parts(rows, 2)[0]
        bits, group_size = known[rows.bits], known["group_size"]
        if width in known:
            size, held = known[width], f"{known[width]} elements"
        else:
            self.take(words, dtype, shape)
            size, rest = divmod(shape[-1] * 32, bits)
            size, held = -1 if rest else size, f"{shape[-1]} words"
        text = f"[{self.op}] {rows.name} have {held} per row"
        if codes and (bits not in CODE_BITS or not codes_fit(size)):
            raise ValueError(
                f"{text} and codes of {bits} bits, expected a power of two of elements from "
                f"{CODE_SIZES[0]} to {CODE_SIZES[1]}, and 2, 3 or 4 bits."
            )
        if not codes and (size < 0 or size % group_size):
            raise ValueError(
                f"{text} of {bits} bits, expected a multiple of group_size = {group_size} elements."
            )
        known |= {width: size, words.sizes[-1]: size * bits // 32, "1": 1}
        known[_parts(rows, 3)[1].sizes[-1]] = size // group_size

    def _dtypes(self, expected: Argument) -> tuple[str, ...]:
        name = expected.dtype
        if name == "F" or (name in ("T", "S", "U") and name not in self.known):
            return tuple(map(dtype_name, FLOATS))
        return (self.known.get(name, name),)

    def _refuse(self, expected: Argument, dtype: mx.Dtype, shape: Shape, words: str) -> None:
        name = expected.name
        name = name.replace("_", " ") if name.startswith("new_") else name
        verb = "are" if name.endswith("s") and not name.endswith(("ss", "bias")) else "is"
        found = f"{name} {verb} {dtype_name(dtype)} {shape}"
        raise ValueError(f"[{self.op}] {found}, expected {words}")

    def _words(self, expected: Argument) -> str:
        """What was expected of an array, with the sizes known so far."""
        known, allowed = self.known, self._dtypes(expected)
        text = f"{_FLOAT_NAMES if len(allowed) > 1 else allowed[0]} {expected.layout}"
        free = [name for name in expected.sizes if name not in known]
        if len(free) < len(expected.sizes):
            shown = ", ".join(str(known.get(name, name)) for name in expected.sizes)
            text += f" = ({shown}{',' if len(expected.sizes) == 1 else ''})"
        notes = ["every size at least 1"] if free else []
        for first, relation, second in self.rules:
            if first in free and (second in known or isinstance(second, int)):
                notes.append(f"{first} {_limit(relation, second, known)}")
            elif second in free and first in known:
                notes.append(f"{second} a multiple of {first} = {known[first]}")
        return ", ".join([text, *notes]) + "."


def _holds(first: str, relation: str, second: Any, known: Known) -> bool:
    """Whether a rule holds, or concerns sizes that are not known yet."""
    size, limit = known.get(first), known.get(second, second)
    return size is None or isinstance(limit, str) or _RELATIONS[relation][1](size, limit)


def codes_fit(size: int) -> bool:
    """Whether rows of this many elements can be kept as codes."""
    return CODE_SIZES[0] <= size <= CODE_SIZES[1] and size & (size - 1) == 0


def array(op: str, name: str, value: object) -> mx.array:
    """``value``, if it is an array of MLX."""
    if not isinstance(value, mx.array):
        raise TypeError(f"[{op}] {name} must be an mlx.core.array, found {type(value).__name__}.")
    return value


def whole(op: str, name: str, value: object) -> int:
    """``value`` as an int; NumPy's integers are accepted, bools are not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"[{op}] {name} must be an integer, found {type(value).__name__}.")
    return int(value)


def _per_sequence(op: str, name: str, value: object, known: Known) -> int | mx.array | None:
    """An integer, limited to int32, which no position exceeds; or int32 [] or [B]."""
    if value is None:
        return None
    if not isinstance(value, mx.array):
        return max(-_INT32, min(whole(op, name, value), _INT32))
    if value.dtype != mx.int32 or value.shape not in ((), (known["B"],)):
        raise ValueError(
            f"[{op}] {name} is {dtype_name(value.dtype)} {value.shape}, expected an integer, or "
            f"int32 () or [B] = ({known['B']},)."
        )
    return value


def _number(op: str, name: str, value: object, bounds: Bounds) -> float:
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
    return _bounded(op, name, found, bounds, {})


_RELATIONS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
    "divides": ("a divisor of", lambda size, multiple: multiple % size == 0),
}
"""Of a number or a size to its limit."""


def _limit(relation: str, limit: Any, known: Known) -> str:
    size = f" = {known[limit]}" if limit in known else ""
    return f"{_RELATIONS[relation][0]} {limit}{size}"


def _bounded(op: str, name: str, found: Number, bounds: Bounds, known: Known) -> Number:
    """``found``, if it is within its bounds, which may be names of sizes."""
    if all(_RELATIONS[bound][1](found, known.get(limit, limit)) for bound, limit in bounds):
        return found
    limits = " and ".join(_limit(*bound, known) for bound in bounds)
    raise ValueError(f"[{op}] {name} is {found}, expected {limits}.")


def _one_of(op: str, name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """``value``, if it is one of the allowed ones."""
    if isinstance(allowed[0], int):
        value = whole(op, name, value)
    if value not in allowed:
        raise ValueError(f"[{op}] {name} is {value!r}, expected one of {allowed}.")
    return value


def placed(op: str, stream: StreamLike) -> contextlib.AbstractContextManager[Any]:
    """Everything inside runs on ``stream``, or where it would run anyway if that is None.

    For a stream of another device, MLX changes the default device of all threads meanwhile.
    """
    if stream is None:
        return _ANYWHERE
    if isinstance(stream, (mx.Stream, mx.Device, mx.DeviceType)):
        return mx.stream(stream)
    raise TypeError(
        f"[{op}] stream must be None, an mlx.core.Stream or an mlx.core.Device, "
        f"found {type(stream).__name__}."
    )


def runs_on_gpu() -> bool:
    """Whether a call would run on a GPU."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def dtype_name(dtype: mx.Dtype) -> str:
    """The name of a dtype in messages: ``float16`` for ``mlx.core.float16``."""
    return str(dtype).removeprefix("mlx.core.")
