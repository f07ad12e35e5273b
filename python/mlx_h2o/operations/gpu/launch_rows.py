"""How operations on a cache's rows become kernel launches, whichever machine runs the kernels.

As in ``launch``, nothing here runs anything.
"""

import math
from functools import lru_cache

import mlx.core as mx

from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.gpu.launches import LANES, LaunchPlan, launch_of, params
from mlx_h2o.operations.requests import PerSequence

SIMDGROUPS = 8  # of a threadgroup: few registers, so any GPU runs it
_THREADS = SIMDGROUPS * LANES
_NEVER = 2**31 - 1  # a position that no row has
_launch = lru_cache(maxsize=1024)(launch_of)


def add_mass(plan: LaunchPlan, importance: mx.array) -> LaunchPlan:
    """Behind the launches of attention, which make ``scores`` and ``lse``, one with one thread per
    row."""
    batch, heads, rows = importance.shape
    grid = (-(-rows // _THREADS) * _THREADS, batch * heads, 1)
    made = ("accumulated", importance.shape, mx.float32)
    each = _launch("add_mass", grid, _THREADS, (made,), NS=SIMDGROUPS)
    return LaunchPlan((*plan.passes, each), {**plan.given, "importance": importance})


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
    elif starts.ndim == 0:
        starts = mx.broadcast_to(starts, (batch,))
    given = {
        "scores": scores,
        "positions": positions,
        "recent_starts": starts,
        "zones": params(sink_size, rows - keep, dtype=mx.int32),
    }
    grid, made = (batch * heads * _THREADS, 1, 1), ("kept", (batch, heads, keep), mx.uint32)
    return LaunchPlan((_launch("keep_rows", grid, _THREADS, (made,), NS=SIMDGROUPS),), given)


def encode_rows(rows: mx.array, bits: int, seed: int) -> LaunchPlan:
    """One simdgroup per row, of rows [B, H, L, D] as ``turbo.encode_rows`` takes them."""
    *before, size = rows.shape
    words = ("words", (*before, size * bits // 32), mx.uint32)
    norms = ("norms", (*before, 1), mx.float32)
    grid = (math.prod(before) * LANES, 1, 1)
    arguments = {"T": rows.dtype, "D": size, "BITS": bits}
    launch = _launch("encode_rows", grid, LANES, (words, norms), **arguments)
    given = {"rows": rows, "signs": turbo.signs(size, seed), "levels": turbo.codebook(size, bits)}
    return LaunchPlan((launch,), given)
