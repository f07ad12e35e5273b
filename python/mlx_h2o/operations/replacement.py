"""Eviction in the steady state: a new row over the worst one of each head, and ranks by keys.

Re-exported by ``fast``. Each call is validated, then served by the best back end (``backends``).
"""

from typing import Any, TypeVar, cast

import mlx.core as mx

from mlx_h2o.operations import cache_requests
from mlx_h2o.operations.arguments import StreamLike
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.requests import Packed, PerSequence, RankName

__all__ = ["key_diversity", "replace_worst"]

K = TypeVar("K", mx.array, Packed)
V = TypeVar("V", mx.array, Packed)


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
    request = cache_requests.key_diversity_request(keys, stream=stream)
    op = "key_diversity"
    result: mx.array = resolve(request.stream, op=op).function(op)(request)
    return result


def replace_worst(
    keys: K,
    values: V,
    importance: mx.array,
    positions: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    *,
    position: PerSequence,
    sink_size: int = 0,
    recent_start: PerSequence | None = None,
    ranks: mx.array | RankName | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    stream: StreamLike = None,
) -> tuple[K, V, mx.array, mx.array]:
    """Steady-state eviction: in each head a new row takes the place of the worst one.

    The row is the one that ``evict_indices(ranks, positions, count=1)`` names. Its key and value
    become the new ones, quantised where the rows are; its importance NaN (not yet scored), its
    position ``position``.

    Args:
        keys: [B, H, N, D], float32, float16 or bfloat16; or packed as ``mx.quantize`` packs them:
            a tuple of words, scales and biases.
        values: [B, H, N, Dv], of one of these dtypes; packed where the keys are.
        importance: float32 [B, H, N].
        positions: int32 [B, H, N], distinct within a head; negative: padding.
        new_keys: [B, H, 1, D], the dtype of the keys, or of their scales.
        new_values: [B, H, 1, Dv], the dtype of the values, or of their scales.
        position: of the new row, 0 to 2**30 - 1, or int32 [B]: one for each sequence.
        sink_size: the first positions, which are protected.
        recent_start: the first position of the protected recent window, or int32 [B]; None: no
            window.
        ranks: float32 [B, H, N], or the name of what they would be: "importance" (as None), "age"
            (the oldest row goes), "key_diversity" (the function of this name).
        bits: per element of packed keys, and of packed values unless ``v_bits`` is given.
        group_size: of packed rows.
        v_bits: per element of packed values.
        stream: stream or device to run on.

    Returns:
        keys, values, importance and positions. Evaluating the keys evaluates all. The arrays that
        were passed never change; where nothing else holds them, a back end may write into their
        memory, so that a row costs no copy of the others (native: always; composed: where MLX's
        own scatter does).

    Raises:
        ValueError: shapes, dtypes or numbers other than these.
        TypeError: an argument that is not an array or an integer where one is expected.
    """
    request = cache_requests.replace_request(
        keys, values, importance, positions, new_keys, new_values, position=position,
        sink_size=sink_size, recent_start=recent_start, ranks=ranks, bits=bits,
        group_size=group_size, v_bits=v_bits, stream=stream,
    )  # fmt: skip
    op = "replace_worst"
    found: Any = resolve(request.stream, op=op).function(op)(request)
    return cast("tuple[K, V, mx.array, mx.array]", found)
