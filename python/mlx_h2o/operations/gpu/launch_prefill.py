"""How the scores of a long chunk become kernel launches, whichever machine runs the kernels.

As in ``launch``, nothing here runs anything.
"""

import mlx.core as mx

from mlx_h2o.operations.gpu.launch import WIDEST_HEAD, flags_of
from mlx_h2o.operations.gpu.launches import (
    LANES,
    Launch,
    LaunchPlan,
    TemplateArguments,
    launch_of,
    params,
)
from mlx_h2o.operations.requests import PrefillRequest

SIMDGROUPS = 8  # of a threadgroup
KEYS = 4  # that a simdgroup holds in registers, for every query
QUERIES = 4  # that a simdgroup holds in registers, for every key


def refuses(request: PrefillRequest) -> str:
    """Why the kernels cannot serve this request; empty if they can."""
    if request.attention.row_bias is not None:
        return "the kernels know no bias of rows"
    size = request.attention.queries.shape[3]
    if size % LANES or size > WIDEST_HEAD:
        return (
            f"the kernels take head sizes that are multiples of {LANES} up to {WIDEST_HEAD}, "
            f"found D = {size}"
        )
    return ""


def plan(request: PrefillRequest) -> LaunchPlan:
    """One launch for the average; for the mass the denominators of all queries first.

    The scores of a pair are made once for the average and twice for the mass. Each sum has an
    order of its own: there are no atomics. The result is ``accumulated``, float32 [B, Hkv, N].
    """
    attention = request.attention
    batch, heads, length, _ = attention.queries.shape
    kv_heads, rows = attention.keys.shape[1:3]
    numbers = (attention.scale, attention.mask_threshold, request.decay, 1 - request.decay)
    assert isinstance(attention.keys, mx.array)
    given = {"queries": attention.queries, "keys": attention.keys, "params": params(*numbers)}
    optional = {"mask": attention.mask, "sinks": attention.sinks}
    given |= {name: array for name, array in optional.items() if array is not None}
    arguments: TemplateArguments = {
        "T": attention.queries.dtype,
        "D": attention.queries.shape[3],
        "NS": SIMDGROUPS,
        "KEYS": KEYS,
        "QUERIES": QUERIES,
        "CAUSAL": attention.causal,
    }
    results = {
        "accumulated": ((batch, kv_heads, rows), mx.float32),
        "lses": ((batch, heads, length), mx.float32),
    }
    threads = SIMDGROUPS * LANES

    def launch(name: str, tiles: int) -> Launch:
        """One threadgroup per KV head and tile."""
        grid = (batch * kv_heads * threads, tiles, 1)
        return launch_of(name, flags_of(attention), arguments, grid, threads, results)

    key_tiles = -(-rows // (SIMDGROUPS * KEYS))
    if request.kind != "mass":
        given["importance"] = _importance(request)
        return LaunchPlan((launch("prefill_average", key_tiles),), given)
    query_tiles = -(-(heads // kv_heads * length) // QUERIES)
    passes = launch("prefill_lse", query_tiles), launch("prefill_mass", key_tiles)
    return LaunchPlan(passes, given)


def _importance(request: PrefillRequest) -> mx.array:
    """The average so far; of no row at first: one NaN in memory."""
    if request.importance is not None:
        return request.importance
    return mx.broadcast_to(mx.array(mx.nan), request.attention.keys.shape[:3])
