"""How operations on a cache's rows become kernel launches, whichever machine runs the kernels.

As in ``launch``, nothing here runs anything.
"""

from collections.abc import Mapping

import mlx.core as mx

from mlx_h2o.operations import kernels
from mlx_h2o.operations.cache_requests import AccumulateRequest, ReplaceRequest
from mlx_h2o.operations.composed_cache import Stored
from mlx_h2o.operations.launch import (
    LANES,
    WIDEST_HEAD,
    Launch,
    TemplateArgument,
    Triple,
    params,
)
from mlx_h2o.operations.replace_requests import Statistics
from mlx_h2o.operations.validate import RetentionRequest

SIMDGROUPS = 8  # of a threadgroup: few registers, so any GPU runs it
_NEVER = 2**31 - 1  # a position that no row has


def accumulate_scores(request: AccumulateRequest) -> Launch:
    """One thread per row and KV head; any number of queries and of heads."""
    batch, heads, rows = request.importance.shape
    threads = SIMDGROUPS * LANES
    return _launch(
        "accumulate_scores",
        {
            "importance": request.importance,
            "scores": request.scores,
            "params": params(request.decay, 1 - request.decay),
        },
        grid=(-(-rows // threads) * threads, batch * heads, 1),
        threadgroup=(threads, 1, 1),
        outputs=(((batch, heads, rows), mx.float32),),
        template=(("NS", SIMDGROUPS),),
    )


def choose_row(request: RetentionRequest) -> Launch:
    """One threadgroup per head; ``request.count`` is 1."""
    batch, heads, _ = request.scores.shape
    threads = SIMDGROUPS * LANES
    recent_start = _NEVER if request.recent_start is None else request.recent_start
    return _launch(
        "choose_row",
        {
            "scores": request.scores,
            "positions": request.positions,
            # Another in every step: no use to keep it.
            "zones": mx.array((request.sink_size, recent_start), mx.int32),
        },
        grid=(batch * heads * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        outputs=(((batch, heads, 1), mx.uint32),),
        template=(("NS", SIMDGROUPS),),
    )


def keep_rows(request: RetentionRequest) -> Launch:
    """One threadgroup per head; fewer rows are dropped than there are."""
    batch, heads, rows = request.scores.shape
    threads = SIMDGROUPS * LANES
    recent_start = _NEVER if request.recent_start is None else request.recent_start
    return _launch(
        "keep_rows",
        {
            "scores": request.scores,
            "positions": request.positions,
            "zones": mx.array((request.sink_size, recent_start, request.count), mx.int32),
        },
        grid=(batch * heads * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        outputs=(((batch, heads, rows - request.count), mx.uint32),),
        template=(("NS", SIMDGROUPS),),
    )


def replace_row(request: ReplaceRequest, ranks: mx.array | None = None) -> Launch:
    """The same, and what is remembered of the new row in its place: three outputs.

    ``ranks`` stand for those that the request only names; None: the kernel knows the name.
    """
    batch, heads, rows = request.positions.shape
    threads = SIMDGROUPS * LANES
    recent_start = _NEVER if request.recent_start is None else request.recent_start
    given = {
        "importance": request.importance,
        "positions": request.positions,
        "zones": mx.array((request.sink_size, recent_start, request.position), mx.int32),
    }
    name = "replace_row"
    template: list[TemplateArgument] = [("NS", SIMDGROUPS)]
    if isinstance(request.ranks, mx.array):
        ranks = request.ranks
    if ranks is not None:
        name, given["scores"] = "replace_row_ranked", ranks
    else:
        template.append(("AGE", request.ranks == "age"))
    return _launch(
        name,
        given,
        grid=(batch * heads * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        outputs=(
            ((batch, heads, 1), mx.uint32),
            ((batch, heads, rows), mx.float32),
            ((batch, heads, rows), mx.int32),
        ),
        template=tuple(template),
    )


def mark_row(request: ReplaceRequest, slots: mx.array) -> Launch:
    """One thread per row: what is remembered of the new row at ``slots`` [B, H, 1]."""
    batch, heads, rows = request.positions.shape
    threads = SIMDGROUPS * LANES
    return _launch(
        "mark_row",
        {
            "slots": slots,
            "importance": request.importance,
            "positions": request.positions,
            "place": mx.array((request.position,), mx.int32),
        },
        grid=(-(-rows // threads) * threads, batch * heads, 1),
        threadgroup=(threads, 1, 1),
        outputs=(((batch, heads, rows), mx.float32), ((batch, heads, rows), mx.int32)),
        template=(("NS", SIMDGROUPS),),
    )


def refuses_statistics(request: ReplaceRequest) -> str:
    """Why the kernel cannot update the statistics of these keys; empty if it can."""
    size = request.new_keys.shape[3]
    if size % LANES or size > WIDEST_HEAD:
        return f"the kernel takes multiples of {LANES} up to {WIDEST_HEAD}, found D = {size}"
    return ""


def update_statistics(
    request: ReplaceRequest, statistics: Statistics, slots: mx.array, new_keys: Stored
) -> Launch:
    """One threadgroup per head; ``new_keys`` as they are stored, packed or not."""
    key_sum, inverse_norms = statistics
    batch, heads, _ = inverse_norms.shape
    threads = SIMDGROUPS * LANES
    given = {"slots": slots, "key_sum": key_sum, "inverse_norms": inverse_norms}
    template: list[TemplateArgument] = [
        ("T", request.new_keys.dtype),
        ("D", request.new_keys.shape[3]),
    ]
    name = "update_statistics"
    if isinstance(request.keys, tuple) and isinstance(new_keys, tuple):
        name += "_quantized"
        for side, packed in (("key", request.keys), ("new", new_keys)):
            parts = zip(("words", "scales", "biases"), packed, strict=True)
            given |= {f"{side}_{part}": array for part, array in parts}
        template += [("KB", request.bits), ("G", request.group_size)]
    elif isinstance(request.keys, mx.array) and isinstance(new_keys, mx.array):
        given |= {"stored_keys": request.keys, "new_keys": new_keys}
    return _launch(
        name,
        given,
        grid=(batch * heads * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        outputs=((key_sum.shape, mx.float32), (inverse_norms.shape, mx.float32)),
        template=(*template, ("NS", SIMDGROUPS)),
    )


def pack_rows(
    new_keys: mx.array, new_values: mx.array, *, bits: int, v_bits: int, group_size: int
) -> Launch:
    """One simdgroup per group of elements, keys [B, H, L, D] and values in one launch."""
    rows = new_keys.shape[:3]
    outputs: list[tuple[tuple[int, ...], mx.Dtype]] = []
    groups = 0
    for array, array_bits in ((new_keys, bits), (new_values, v_bits)):
        size = array.shape[3]
        groups += array.size // group_size
        pair = ((*rows, size // group_size), array.dtype)
        outputs += [((*rows, size * array_bits // 32), mx.uint32), pair, pair]
    return _launch(
        "pack_rows",
        {"new_keys": new_keys, "new_values": new_values},
        grid=(groups * LANES, 1, 1),
        threadgroup=(LANES, 1, 1),
        outputs=tuple(outputs),
        template=(
            ("T", new_keys.dtype),
            ("S", new_values.dtype),
            ("KB", bits),
            ("VB", v_bits),
            ("G", group_size),
        ),
    )


def _launch(
    name: str,
    given: Mapping[str, mx.array],
    *,
    grid: Triple,
    threadgroup: Triple,
    outputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...],
    template: tuple[TemplateArgument, ...],
) -> Launch:
    return Launch(
        kernel=kernels.resolve(name, frozenset()),
        given=given,
        template=tuple(template),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=tuple(shape for shape, _ in outputs),
        output_dtypes=tuple(dtype for _, dtype in outputs),
    )
