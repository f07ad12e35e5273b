"""How operations on a cache's rows become kernel launches, whichever machine runs the kernels.

As in ``launch``, nothing here runs anything.
"""

import math
from typing import Any

import mlx.core as mx

from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.gpu.launch import flags_of
from mlx_h2o.operations.gpu.launches import LANES, Launch, LaunchPlan, launch_of, params
from mlx_h2o.operations.requests import AttentionRequest, PerSequence

SIMDGROUPS = 8  # of a threadgroup: few registers, so any GPU runs it
_THREADS = SIMDGROUPS * LANES
KEYS = QUERIES = 4  # that a simdgroup holds in registers, for every one of the others
_NEVER = 2**31 - 1  # a position that no row has


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
    return LaunchPlan((launch_of("keep_rows", grid, _THREADS, (made,), NS=SIMDGROUPS),), given)


def encode_rows(rows: mx.array, bits: int, seed: int) -> LaunchPlan:
    """One simdgroup per row, of rows [B, H, L, D] as ``turbo.encode_rows`` takes them."""
    *before, size = rows.shape
    words = ("words", (*before, size * bits // 32), mx.uint32)
    norms = ("norms", (*before, 1), mx.float32)
    grid = (math.prod(before) * LANES, 1, 1)
    arguments = {"T": rows.dtype, "D": size, "BITS": bits}
    launch = launch_of("encode_rows", grid, LANES, (words, norms), **arguments)
    given = {"rows": rows, "signs": turbo.signs(size, seed), "levels": turbo.codebook(size, bits)}
    return LaunchPlan((launch,), given)


def prefill_mass(request: AttentionRequest) -> LaunchPlan:
    """First the denominators of all queries, then ``accumulated``, float32 [B, Hkv, N].

    The scores of a pair are made twice. Each sum has an order of its own: there are no atomics.
    """
    batch, heads, length, size = request.queries.shape
    kv_heads, rows = request.keys.shape[1:3]
    numbers = params(request.scale, request.mask_threshold)
    given: dict[str, Any] = {"queries": request.queries, "keys": request.keys, "params": numbers}
    optional = {"mask": request.mask, "sinks": request.sinks}
    given |= {name: array for name, array in optional.items() if array is not None}
    accumulated = ("accumulated", (batch, kv_heads, rows), mx.float32)
    made = (accumulated, ("lses", (batch, heads, length), mx.float32))

    def launch(name: str, tiles: int) -> Launch:
        """One threadgroup per KV head and tile."""
        return launch_of(
            name, (batch * kv_heads * _THREADS, tiles, 1), _THREADS, made, flags_of(request),
            T=request.queries.dtype, D=size, NS=SIMDGROUPS, KEYS=KEYS, QUERIES=QUERIES,
            CAUSAL=request.causal,
        )  # fmt: skip

    denominators = launch("prefill_lse", -(-(heads // kv_heads * length) // QUERIES))
    return LaunchPlan(
        (denominators, launch("prefill_mass", -(-rows // (SIMDGROUPS * KEYS)))), given
    )
