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
from mlx_h2o.operations.requests import PerSequence

SIMDGROUPS = 8  # of a threadgroup: few registers, so any GPU runs it
_THREADS = SIMDGROUPS * LANES
_NEVER = 2**31 - 1  # a position that no row has
_NO_FLAGS: frozenset[str] = frozenset()


def accumulate_scores(importance: mx.array, scores: mx.array, decay: float) -> LaunchPlan:
    """One thread per row and KV head; any number of queries and of heads."""
    given = {"importance": importance, "scores": scores, "params": params(decay, 1 - decay)}
    return LaunchPlan((_accumulation(*importance.shape),), given)


@lru_cache(maxsize=1024)
def _accumulation(batch: int, heads: int, rows: int) -> Launch:
    grid = (-(-rows // _THREADS) * _THREADS, batch * heads, 1)
    results = {"accumulated": ((batch, heads, rows), mx.float32)}
    arguments = {"NS": SIMDGROUPS}
    return launch_of("accumulate_scores", _NO_FLAGS, arguments, grid, _THREADS, results)


def keep_rows(
    scores: mx.array,
    positions: mx.array,
    keep: int,
    sink_size: int = 0,
    recent_start: PerSequence | None = None,
) -> LaunchPlan:
    """One threadgroup per head; fewer rows are kept than there are."""
    batch, heads, rows = scores.shape
    starts = _NEVER if recent_start is None else recent_start
    if isinstance(starts, int):  # another in every step: no use to keep it
        starts = mx.array([starts] * batch, mx.int32)
    given = {
        "scores": scores,
        "positions": positions,
        "recent_starts": mx.broadcast_to(starts, (batch,)),
        "zones": _integers(sink_size, rows - keep),
    }
    return LaunchPlan((_keeping(batch, heads, keep),), given)


@lru_cache(maxsize=1024)
def _keeping(batch: int, heads: int, kept: int) -> Launch:
    grid, results = (batch * heads * _THREADS, 1, 1), {"kept": ((batch, heads, kept), mx.uint32)}
    return launch_of("keep_rows", _NO_FLAGS, {"NS": SIMDGROUPS}, grid, _THREADS, results)


@lru_cache(maxsize=64)
def _integers(*numbers: int) -> mx.array:
    return mx.array(numbers, mx.int32)


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
