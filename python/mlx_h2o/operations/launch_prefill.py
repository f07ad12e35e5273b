"""How the scores of a long chunk become kernel launches, whichever machine runs the kernels.

As in ``launch``, nothing here runs anything.
"""

from collections.abc import Mapping

import mlx.core as mx

from mlx_h2o.operations import kernels
from mlx_h2o.operations.launch import (
    LANES,
    WIDEST_HEAD,
    Launch,
    LaunchPlan,
    TemplateArgument,
    flags_of,
    params,
)
from mlx_h2o.operations.requests import PrefillRequest

SIMDGROUPS = 8  # of a threadgroup
KEYS = 4  # that a simdgroup holds in registers, for every query
QUERIES = 4  # that a simdgroup holds in registers, for every key

Output = tuple[tuple[int, ...], mx.Dtype]


def refuses(request: PrefillRequest) -> str:
    """Why the kernels cannot serve this request; empty if they can."""
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
    keys = _launch(
        "prefill_mass" if request.kind == "mass" else "prefill_average",
        request,
        given | {"importance": _importance(request)},
        tiles=-(-rows // (SIMDGROUPS * KEYS)),
        tile=("KEYS", KEYS),
        output=((batch, kv_heads, rows), mx.float32),
    )
    if request.kind != "mass":
        return LaunchPlan((keys,))
    denominators = _launch(
        "prefill_lse",
        request,
        given,
        tiles=-(-(heads // kv_heads * length) // QUERIES),
        tile=("QUERIES", QUERIES),
        output=((batch, heads, length), mx.float32),
    )
    return LaunchPlan((denominators, keys))


def _importance(request: PrefillRequest) -> mx.array:
    """The average so far; of no row at first: one NaN in memory."""
    if request.importance is not None:
        return request.importance
    return mx.broadcast_to(mx.array(mx.nan), request.attention.keys.shape[:3])


def _launch(
    name: str,
    request: PrefillRequest,
    given: Mapping[str, mx.array],
    *,
    tiles: int,
    tile: TemplateArgument,
    output: Output,
) -> Launch:
    """One threadgroup per KV head and tile."""
    queries, keys = request.attention.queries, request.attention.keys
    kernel = kernels.resolve(name, flags_of(request.attention))
    threads = SIMDGROUPS * LANES
    return Launch(
        kernel=kernel,
        given={name: given[name] for name in kernel.inputs if name in given},
        template=(
            ("T", queries.dtype),
            ("D", queries.shape[3]),
            ("NS", SIMDGROUPS),
            tile,
            ("CAUSAL", request.attention.causal),
        ),
        grid=(keys.shape[0] * keys.shape[1] * threads, tiles, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=(output[0],),
        output_dtypes=(output[1],),
    )
