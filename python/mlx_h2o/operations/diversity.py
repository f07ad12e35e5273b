"""Key diversity, a rank of rows by their keys; re-exported by ``fast``."""

import mlx.core as mx

from mlx_h2o.operations import arguments
from mlx_h2o.operations.arguments import FLOATS, StreamLike
from mlx_h2o.operations.arguments import found as _found
from mlx_h2o.operations.backends import serve
from mlx_h2o.operations.composed import rows as composed_cache
from mlx_h2o.operations.requests import KeyDiversityRequest


def key_diversity(keys: mx.array, *, stream: StreamLike = None) -> mx.array:
    """Minus the cosine of each key with the mean of the normalised keys of its head.

    Args:
        keys: [B, H, N, D], float32, float16 or bfloat16.
        stream: stream or device to run on.

    Returns:
        float32 [B, H, N]; a key of zeros gets 0. Computed in float32.

    Raises:
        ValueError: another shape or dtype.
        TypeError: ``keys`` is not an array.
    """
    op = "key_diversity"
    keys = arguments.array(op, "keys", keys)
    if keys.ndim != 4 or 0 in keys.shape or keys.dtype not in FLOATS:
        raise ValueError(
            f"[{op}] keys are {_found(keys)}, expected float32, float16 or bfloat16 "
            "[B, H, N, D], every size at least 1."
        )
    request = KeyDiversityRequest(keys, arguments.stream(op, stream))
    return serve(composed_cache.key_diversity, request)
