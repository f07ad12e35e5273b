"""The running sum of normalised keys, and their norms: what keydiff needs without reading keys.

Re-exported by ``fast``. ``replace_worst`` keeps them up to date.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.arguments import StreamLike
from mlx_h2o.operations.placement import placed
from mlx_h2o.operations.replace_requests import Packed, Statistics, as_packed
from mlx_h2o.operations.validate import FLOATS, dtype_name
from mlx_h2o.operations.validate_quantized import BITS, GROUP_SIZES, packed_rows

__all__ = ["LEAST_NORM", "dense_rows", "inverse_norms_of", "key_statistics"]

LEAST_NORM = 1e-12  # a key of zeros has the direction 0, not NaN

_OP = "key_statistics"


def key_statistics(
    keys: mx.array | Packed, *, bits: int = 8, group_size: int = 64, stream: StreamLike = None
) -> Statistics:
    """Sum of the normalised keys of each head, and the reciprocal norm of each key.

    ``key_sum`` over its own norm is the direction that ``key_diversity`` compares keys with.

    Args:
        keys: [B, H, N, D], float32, float16 or bfloat16; or packed as ``mx.quantize`` packs them,
            then those of the dequantised keys.
        bits: of packed keys.
        group_size: of packed keys.
        stream: stream or device to run on.

    Returns:
        ``key_sum`` float32 [B, H, D] and ``inverse_norms`` float32 [B, H, N], at most 1e12.

    Raises:
        ValueError: another shape or dtype.
        TypeError: what is not an array or an integer where one is expected.
    """
    keys = as_packed(keys)
    if isinstance(keys, tuple):
        for name, number, known in (("bits", bits, BITS), ("group_size", group_size, GROUP_SIZES)):
            if arguments.integer(_OP, name, number) not in known:
                raise ValueError(f"[{_OP}] {name} is {number}, expected one of {known}.")
        packed_rows(_OP, "key", keys, bits=bits, group_size=group_size)
    else:
        found = arguments.array(_OP, "keys", keys)
        if found.ndim != 4 or 0 in found.shape or found.dtype not in FLOATS:
            raise ValueError(
                f"[{_OP}] keys are {dtype_name(found.dtype)} {found.shape}, expected float32, "
                "float16 or bfloat16 [B, H, N, D], every size at least 1."
            )
    with placed(arguments.stream(_OP, stream)):
        dense = dense_rows(keys, bits, group_size)
        inverse_norms = inverse_norms_of(dense)
        return mx.sum(dense * mx.expand_dims(inverse_norms, -1), axis=2), inverse_norms


def dense_rows(rows: mx.array | Packed, bits: int, group_size: int) -> mx.array:
    """The rows in float32, dequantised in float32 where they are packed."""
    if not isinstance(rows, tuple):
        return rows.astype(mx.float32)
    words, scales, biases = rows
    return mx.dequantize(
        words, scales.astype(mx.float32), biases.astype(mx.float32),
        group_size=group_size, bits=bits,
    )  # fmt: skip


def inverse_norms_of(dense: mx.array) -> mx.array:
    """1 over the norm of each row, float32 [B, H, N] of [B, H, N, D]."""
    norms = mx.sqrt(mx.sum(mx.square(dense), axis=-1))
    return 1 / mx.maximum(norms, LEAST_NORM)
