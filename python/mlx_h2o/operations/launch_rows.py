"""How operations on a cache's rows become kernel launches, whichever machine runs the kernels.

As in ``launch``, nothing here runs anything.
"""

from collections.abc import Mapping
from functools import lru_cache

import mlx.core as mx

from mlx_h2o.operations import kernels
from mlx_h2o.operations.launch import LANES, Launch, TemplateArgument, Triple, params
from mlx_h2o.operations.requests import (
    AccumulateRequest,
    PerSequence,
    ReplaceRequest,
    RetentionRequest,
)

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
    return _per_head(
        "choose_row",
        {"scores": request.scores, **_zones(request, request.sink_size)},
        outputs=(((batch, heads, 1), mx.uint32),),
        template=(("NS", SIMDGROUPS),),
    )


def keep_rows(request: RetentionRequest) -> Launch:
    """One threadgroup per head; fewer rows are dropped than there are."""
    batch, heads, rows = request.scores.shape
    return _per_head(
        "keep_rows",
        {"scores": request.scores, **_zones(request, request.sink_size, request.count)},
        outputs=(((batch, heads, rows - request.count), mx.uint32),),
        template=(("NS", SIMDGROUPS),),
    )


def replace_row(request: ReplaceRequest, ranks: mx.array | None = None) -> Launch:
    """The same, and what is remembered of the new row in its place: three outputs.

    ``ranks`` stand for those that the request only names; None: the kernel knows the name.
    """
    batch, heads, rows = request.positions.shape
    given = {
        "importance": request.importance,
        "newest": _of_sequences(request.position, batch),
        **_zones(request, request.sink_size),
    }
    name = "replace_row"
    template: list[TemplateArgument] = [("NS", SIMDGROUPS)]
    if isinstance(request.ranks, mx.array):
        ranks = request.ranks
    if ranks is not None:
        name, given["scores"] = "replace_row_ranked", ranks
    else:
        template.append(("AGE", request.ranks == "age"))
    return _per_head(
        name,
        given,
        outputs=(
            ((batch, heads, 1), mx.uint32),
            ((batch, heads, rows), mx.float32),
            ((batch, heads, rows), mx.int32),
        ),
        template=tuple(template),
    )


def _of_sequences(value: PerSequence, batch: int) -> mx.array:
    """int32 [B]; one number for all has no stride."""
    # Another in every step: no use to keep it.
    array = mx.array(value, mx.int32) if isinstance(value, int) else value
    return mx.broadcast_to(array, (batch,))


def _zones(request: RetentionRequest | ReplaceRequest, *numbers: int) -> dict[str, mx.array]:
    """The positions, where the recent window begins in each sequence, and the ``numbers``."""
    start = _NEVER if request.recent_start is None else request.recent_start
    return {
        "positions": request.positions,
        "recent_starts": _of_sequences(start, request.positions.shape[0]),
        "zones": _integers(*numbers),
    }


@lru_cache(maxsize=64)
def _integers(*numbers: int) -> mx.array:
    return mx.array(numbers, mx.int32)


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


def _per_head(
    name: str,
    given: Mapping[str, mx.array],
    *,
    outputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...],
    template: tuple[TemplateArgument, ...],
) -> Launch:
    """One threadgroup per head of each sequence."""
    batch, heads, _ = given["positions"].shape
    threads = SIMDGROUPS * LANES
    grid = (batch * heads * threads, 1, 1)
    return _launch(
        name,
        given,
        grid=grid,
        threadgroup=(threads, 1, 1),
        outputs=outputs,
        template=template,
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
