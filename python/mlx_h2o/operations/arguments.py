"""Checks of single arguments of the operations: is it an array, an integer, a number, a stream?

What is of another type altogether is a TypeError; what has the type and not the value, ValueError.
"""

import math
import numbers

import mlx.core as mx

StreamLike = mx.Stream | mx.Device | None

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
