"""How the scores of a long chunk become kernel launches, whichever machine runs the kernels.

As in ``launch``, nothing here runs anything.
"""

import mlx.core as mx

from mlx_h2o.operations.gpu.launch import flags_of, refuses_size
from mlx_h2o.operations.gpu.launches import LANES, Launch, LaunchPlan, launch_of, params
from mlx_h2o.operations.requests import AttentionRequest

SIMDGROUPS = 8  # of a threadgroup
KEYS = 4  # that a simdgroup holds in registers, for every query
QUERIES = 4  # that a simdgroup holds in registers, for every key


def refuses(request: AttentionRequest) -> str:
    """Why the kernels cannot serve this request; empty if they can."""
    if request.row_bias is not None:
        return "the kernels know no bias of rows"
    return refuses_size("D", request.queries.shape[3])


def plan(request: AttentionRequest, importance: mx.array | None, decay: float | None) -> LaunchPlan:
    """One launch for the average; for the mass the denominators of all queries first.

    The scores of a pair are made once for the average and twice for the mass. Each sum has an
    order of its own: there are no atomics. The result is ``accumulated``, float32 [B, Hkv, N].
    """
    batch, heads, length, size = request.queries.shape
    kv_heads, rows = request.keys.shape[1:3]
    share = 0.0 if decay is None else decay
    numbers = (request.scale, request.mask_threshold, share, 1 - share)
    assert isinstance(request.keys, mx.array)
    given = {"queries": request.queries, "keys": request.keys, "params": params(*numbers)}
    optional = {"mask": request.mask, "sinks": request.sinks}
    given |= {name: array for name, array in optional.items() if array is not None}
    arguments = {
        "T": request.queries.dtype,
        "D": size,
        "NS": SIMDGROUPS,
        "KEYS": KEYS,
        "QUERIES": QUERIES,
        "CAUSAL": request.causal,
    }
    accumulated = ("accumulated", (batch, kv_heads, rows), mx.float32)
    made = (accumulated, ("lses", (batch, heads, length), mx.float32))
    threads = SIMDGROUPS * LANES

    def launch(name: str, tiles: int) -> Launch:
        """One threadgroup per KV head and tile."""
        grid = (batch * kv_heads * threads, tiles, 1)
        return launch_of(name, grid, threads, made, flags_of(request), **arguments)

    key_tiles = -(-rows // (SIMDGROUPS * KEYS))
    if decay is not None:
        # Of no row at first: one NaN in memory.
        unscored = mx.array(mx.nan) if importance is None else importance
        given["importance"] = mx.broadcast_to(unscored, (batch, kv_heads, rows))
        return LaunchPlan((launch("prefill_average", key_tiles),), given)
    query_tiles = -(-(heads // kv_heads * length) // QUERIES)
    passes = launch("prefill_lse", query_tiles), launch("prefill_mass", key_tiles)
    return LaunchPlan(passes, given)
