"""Checks of single arguments of the operations: is it an array, an integer, a number, a stream?

What is of another type altogether is a TypeError; what has the type and not the value, ValueError.
"""

import math
import numbers

import mlx.core as mx

StreamLike = mx.Stream | mx.Device | None

FLOATS: tuple[mx.Dtype, ...] = (mx.float32, mx.float16, mx.bfloat16)
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)

_INT32 = 2**31 - 1

_FLOAT32 = float(mx.finfo(mx.float32).max)


def array(op: str, name: str, value: object) -> mx.array:
    """``value``, if it is an array of MLX."""
    if not isinstance(value, mx.array):
        raise TypeError(f"[{op}] {name} must be an mlx.core.array, found {type(value).__name__}.")
    return value


def integer(op: str, name: str, value: object) -> int:
    """``value`` as an int; NumPy's integers are welcome, bools are not numbers here."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"[{op}] {name} must be an integer, found {type(value).__name__}.")
    return int(value)


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


def number(op: str, name: str, value: object) -> float:
    """``value`` as a float that is finite in float32; NumPy's numbers are welcome."""
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
    return found


def dtype_name(dtype: mx.Dtype) -> str:
    """``mlx.core.float16`` is ``float16`` in messages."""
    return str(dtype).removeprefix("mlx.core.")


def found(array: mx.array) -> str:
    """Dtype and shape, as messages say them."""
    return f"{dtype_name(array.dtype)} {array.shape}"


def dimensions(op: str, name: str, shape: tuple[int, ...], layout: str) -> None:
    """Raise ValueError where ``shape`` has not as many sizes as ``layout`` names."""
    expected = layout.count(",") + 1
    if len(shape) != expected:
        raise ValueError(
            f"[{op}] {name} have {len(shape)} dimensions, expected {expected} {layout}."
        )


def not_empty(op: str, name: str, shape: tuple[int, ...], layout: str) -> None:
    """Raise ValueError where a size is 0."""
    if 0 in shape:
        raise ValueError(
            f"[{op}] {name} are empty: found shape {shape}, "
            f"expected every size of {layout} to be at least 1."
        )


def floats(op: str, name: str, dtype: mx.Dtype) -> None:
    """Raise ValueError where ``dtype`` is none of the floats that are served."""
    if dtype not in FLOATS:
        raise ValueError(
            f"[{op}] {name} are {dtype_name(dtype)}, expected float32, float16 or bfloat16."
        )


def packing(op: str, bits: object, v_bits: object, group_size: object) -> tuple[int, int, int]:
    """Bits of the keys and of the values, and the group size, of packed rows."""
    key_bits = integer(op, "bits", bits)
    v_bits = key_bits if v_bits is None else integer(op, "v_bits", v_bits)
    size = integer(op, "group_size", group_size)
    known = (("bits", key_bits, BITS), ("v_bits", v_bits, BITS))
    for name, value, expected in (*known, ("group_size", size, GROUP_SIZES)):
        if value not in expected:
            raise ValueError(f"[{op}] {name} is {value}, expected one of {expected}.")
    return key_bits, v_bits, size


def decay(op: str, value: object) -> float:
    """The factor of a moving average."""
    factor = number(op, "decay", value)
    if not 0 <= factor < 1:
        raise ValueError(f"[{op}] decay is {factor}, expected at least 0 and below 1.")
    return factor


def per_sequence(op: str, name: str, value: object, batch: int) -> int | mx.array:
    """One integer for all sequences, or int32 [] or [B]."""
    if not isinstance(value, mx.array):
        return integer(op, name, value)
    if value.dtype != mx.int32 or value.shape not in ((), (batch,)):
        raise ValueError(
            f"[{op}] {name} is {found(value)}, "
            f"expected an integer, or int32 () or [B] = ({batch},)."
        )
    return value


def zones(
    op: str, sink_size: object, recent_start: object, batch: int
) -> tuple[int, int | mx.array | None]:
    """The protected zones; integers are cut to int32."""
    sinks = integer(op, "sink_size", sink_size)
    if sinks < 0:
        raise ValueError(f"[{op}] sink_size is {sinks}, expected 0 or more.")
    if recent_start is not None:
        recent_start = per_sequence(op, "recent_start", recent_start, batch)
        if isinstance(recent_start, int):
            # Positions end far below: a limit outside int32 says the same as the nearest inside.
            recent_start = max(-_INT32, min(recent_start, _INT32))
    return min(sinks, _INT32), recent_start
