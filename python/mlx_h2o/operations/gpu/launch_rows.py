"""How operations on a cache's rows become kernel launches, whichever machine runs the kernels.

As in ``launch``, nothing here runs anything.
"""

import math
from functools import lru_cache

import mlx.core as mx

from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.gpu.launches import (
    LANES,
    Launch,
    LaunchPlan,
    TemplateArguments,
    launch_of,
    params,
)
from mlx_h2o.operations.requests import (
    AccumulateRequest,
    PerSequence,
    RetentionRequest,
)

SIMDGROUPS = 8  # of a threadgroup: few registers, so any GPU runs it
_THREADS = SIMDGROUPS * LANES
_NEVER = 2**31 - 1  # a position that no row has
_NO_FLAGS: frozenset[str] = frozenset()


def accumulate_scores(request: AccumulateRequest) -> LaunchPlan:
    """One thread per row and KV head; any number of queries and of heads."""
    given = {
        "importance": request.importance,
        "scores": request.scores,
        "params": params(request.decay, 1 - request.decay),
    }
    return LaunchPlan((_accumulation(*request.importance.shape),), given)


@lru_cache(maxsize=1024)
def _accumulation(batch: int, heads: int, rows: int) -> Launch:
    grid = (-(-rows // _THREADS) * _THREADS, batch * heads, 1)
    results = {"accumulated": ((batch, heads, rows), mx.float32)}
    arguments = {"NS": SIMDGROUPS}
    return launch_of("accumulate_scores", _NO_FLAGS, arguments, grid, _THREADS, results)


def keep_rows(request: RetentionRequest) -> LaunchPlan:
    """One threadgroup per head; fewer rows are dropped than there are."""
    batch, heads, rows = request.scores.shape
    start = _NEVER if request.recent_start is None else request.recent_start
    given = {
        "scores": request.scores,
        "positions": request.positions,
        "recent_starts": _of_sequences(start, batch),
        "zones": _integers(request.sink_size, request.count),
    }
    return LaunchPlan((_keeping(batch, heads, rows - request.count),), given)


@lru_cache(maxsize=1024)
def _keeping(batch: int, heads: int, kept: int) -> Launch:
    grid, results = (batch * heads * _THREADS, 1, 1), {"kept": ((batch, heads, kept), mx.uint32)}
    return launch_of("keep_rows", _NO_FLAGS, {"NS": SIMDGROUPS}, grid, _THREADS, results)


def _of_sequences(value: PerSequence, batch: int) -> mx.array:
    """int32 [B]."""
    # Another in every step: no use to keep it.
    if isinstance(value, int):
        return mx.array([value] * batch, mx.int32)
    return mx.broadcast_to(value, (batch,))


@lru_cache(maxsize=64)
def _integers(*numbers: int) -> mx.array:
    return mx.array(numbers, mx.int32)


def pack_rows(
    new_keys: mx.array, new_values: mx.array, *, bits: int, v_bits: int, group_size: int
) -> LaunchPlan:
    """One simdgroup per group of elements, keys [B, H, L, D] and values in one launch."""
    results = {}
    groups = 0
    for side, array, array_bits in (("key", new_keys, bits), ("value", new_values, v_bits)):
        rows, size = array.shape[:3], array.shape[3]
        groups += array.size // group_size
        results[f"{side}_words"] = (*rows, size * array_bits // 32), mx.uint32
        for part in ("scales", "biases"):
            results[f"{side}_{part}"] = (*rows, size // group_size), array.dtype
    given = {"new_keys": new_keys, "new_values": new_values}
    arguments: TemplateArguments = {
        "T": new_keys.dtype,
        "S": new_values.dtype,
        "KB": bits,
        "VB": v_bits,
        "G": group_size,
    }
    grid = (groups * LANES, 1, 1)
    packing = launch_of("pack_rows", _NO_FLAGS, arguments, grid, LANES, results)
    return LaunchPlan((packing,), given)


def encode_rows(rows: mx.array, bits: int, seed: int) -> LaunchPlan:
    """One simdgroup per row, of rows [B, H, L, D] as ``turbo.encode_rows`` takes them."""
    size = rows.shape[3]
    given = {"rows": rows, "signs": turbo.signs(size, seed), "levels": turbo.codebook(size, bits)}
    return LaunchPlan((_encoding(tuple(rows.shape), rows.dtype, bits),), given)


@lru_cache(maxsize=1024)
def _encoding(shape: tuple[int, ...], dtype: mx.Dtype, bits: int) -> Launch:
    *before, size = shape
    results = {
        "words": ((*before, size * bits // 32), mx.uint32),
        "norms": ((*before, 1), mx.float32),
    }
    arguments: TemplateArguments = {"T": dtype, "D": size, "BITS": bits}
    grid = (math.prod(before) * LANES, 1, 1)
    return launch_of("encode_rows", _NO_FLAGS, arguments, grid, LANES, results)
