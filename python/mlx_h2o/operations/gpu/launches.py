"""Kernel launches: a single one, a plan of several for one request, and those of the operations on
a cache's rows. Nothing here runs anything."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.gpu import kernels
from mlx_h2o.operations.gpu.kernels import Kernel
from mlx_h2o.operations.requests import PerSequence

LANES = 32  # threads of a simdgroup

TemplateArgument = int | bool | mx.Dtype
Triple = tuple[int, int, int]


@dataclass(eq=False)
class Launch:
    """One launch: the arguments of ``mx.fast.metal_kernel`` and of its kernel object, without the
    buffers."""

    kernel: Kernel
    template: list[tuple[str, TemplateArgument]]
    grid: Triple
    threadgroup: Triple
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]


Made = tuple[str, tuple[int, ...], mx.Dtype]
"""Name, shape and dtype of an output that a kernel may have."""


def launch_of(
    name: str,
    grid: Triple,
    threads: int,
    made: Iterable[Made],
    flags: frozenset[str] = frozenset(),
    **arguments: TemplateArgument,
) -> Launch:
    """The launch of a kernel, which picks its outputs and arguments by name."""
    kernel = kernels.kernel_for(name, flags)
    results = {one: (shape, dtype) for one, shape, dtype in made}
    return Launch(
        kernel=kernel,
        template=[(one, arguments[one]) for one in kernel.template],
        grid=grid,
        threadgroup=(threads, 1, 1),
        output_shapes=[results[one][0] for one in kernel.outputs],
        output_dtypes=[results[one][1] for one in kernel.outputs],
    )


class LaunchPlan(NamedTuple):
    """The launches that serve a request, in order; later ones read outputs of earlier ones.

    ``given`` are the buffers of the request by name; None for those that it does not have.
    """

    passes: tuple[Launch, ...]
    given: Mapping[str, mx.array | None]


@lru_cache(maxsize=64)
def params(*numbers: float, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The scalars of a kernel: one short array, the same for all layers of a model."""
    return mx.array(numbers, dtype)


SIMDGROUPS = 8  # of a threadgroup: few registers, so any GPU runs it
_THREADS = SIMDGROUPS * LANES
_NEVER = 2**31 - 1  # a position that no row has
_launch = lru_cache(maxsize=1024)(launch_of)


def add_mass(plan: LaunchPlan, importance: mx.array) -> LaunchPlan:
    """The launches of attention, which make ``scores`` and ``lse``, then one with a thread per
    row."""
    batch, heads, rows = importance.shape
    grid = (-(-rows // _THREADS) * _THREADS, batch * heads, 1)
    made = ("accumulated", importance.shape, mx.float32)
    each = _launch("add_mass", grid, _THREADS, (made,), NS=SIMDGROUPS)
    return LaunchPlan((*plan.passes, each), {**plan.given, "importance": importance})


@lru_cache(maxsize=16)
def over(passes: tuple[Launch, ...], rows: int) -> tuple[Launch, ...]:
    """Launches of attention for another number of rows, with the same number of blocks."""
    first, *others = passes
    shapes, place = [*first.output_shapes], first.kernel.outputs.index("scores")
    shapes[place] = (*shapes[place][:-1], rows)
    fixed = first.kernel, first.template, first.grid, first.threadgroup
    return Launch(*fixed, shapes, first.output_dtypes), *others


def keep_rows(
    scores: mx.array,
    positions: mx.array,
    keep: int,
    sink_size: int = 0,
    recent_start: PerSequence | None = None,
) -> LaunchPlan:
    """One threadgroup per head; ``keep`` must be less than the number of rows."""
    batch, heads, rows = scores.shape
    starts = _NEVER if recent_start is None else recent_start
    if isinstance(starts, int):  # differs in every step, so it is not cached
        starts = mx.array(starts, mx.int32)
    given = {
        "scores": scores,
        "positions": positions,
        "recent_starts": mx.broadcast_to(starts, (batch,)),
        "zones": params(sink_size, rows - keep, dtype=mx.int32),
    }
    grid, made = (batch * heads * _THREADS, 1, 1), ("kept", (batch, heads, keep), mx.uint32)
    return LaunchPlan((_launch("keep_rows", grid, _THREADS, (made,), NS=SIMDGROUPS),), given)


def encode_rows(rows: mx.array, bits: int, seed: int) -> LaunchPlan:
    """One simdgroup per row, for rows [B, H, L, D] as in ``turbo.encode_rows``."""
    *before, size = rows.shape
    words = ("words", (*before, size * bits // 32), mx.uint32)
    norms = ("norms", (*before, 1), mx.float32)
    grid = (math.prod(before) * LANES, 1, 1)
    arguments = {"T": rows.dtype, "D": size, "BITS": bits}
    launch = _launch("encode_rows", grid, LANES, (words, norms), **arguments)
    given = {"rows": rows, "signs": turbo.signs(size, seed), "levels": turbo.codebook(size, bits)}
    return LaunchPlan((launch,), given)
