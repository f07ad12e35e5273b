"""How an attention request becomes one kernel launch, whichever machine runs the kernel.

Nothing here runs anything: ``plan`` names the kernel, its flags, buffers, template arguments
and grid, and the Metal, CUDA and test back ends hand that to MLX in their own way.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from mlx_h2o import kernels
from mlx_h2o.kernels import Kernel
from mlx_h2o.validate import AttentionRequest

LANES = 32  # threads of a simdgroup
LONGEST_QUERY = 8
WIDEST_HEAD = 576

TemplateArgument = tuple[str, int | bool | mx.Dtype]
AttentionResult = tuple[mx.array, mx.array | None, mx.array | None]
Triple = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """One launch: what ``mx.fast.metal_kernel`` and its kernel object are called with."""

    kernel: Kernel
    inputs: tuple[mx.array, ...]
    template: tuple[TemplateArgument, ...]
    grid: Triple
    threadgroup: Triple
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]

    def call(self) -> dict[str, Any]:
        """The arguments of the kernel object, but for the inputs and the stream."""
        return {
            "template": list(self.template),
            "grid": self.grid,
            "threadgroup": self.threadgroup,
            "output_shapes": list(self.output_shapes),
            "output_dtypes": list(self.output_dtypes),
        }

    def result(self, outputs: list[mx.array]) -> AttentionResult:
        """The outputs as (out, scores, lse); None for one that was not asked for."""
        named = dict(zip(self.kernel.outputs, outputs, strict=True))
        return named["out"], named.get("scores"), named.get("lse")


def refuses(request: AttentionRequest) -> str:
    """Why the decode kernels cannot serve this request; empty if they can."""
    length, head_size = request.queries.shape[2:]
    if length > LONGEST_QUERY:
        return f"decode kernels take up to {LONGEST_QUERY} queries, found Lq = {length}"
    for name, size in (("D", head_size), ("Dv", request.values.shape[3])):
        if size % LANES or size > WIDEST_HEAD:
            return (
                f"the kernels take head sizes that are multiples of {LANES} "
                f"up to {WIDEST_HEAD}, found {name} = {size}"
            )
    return ""


def preferred_simdgroups(head_size: int, value_size: int) -> int:
    """Simdgroups per threadgroup: wider rows need more registers per thread."""
    width = head_size + value_size
    if width <= 256:
        return 32
    return 16 if width <= 512 else 8


def flags_of(request: AttentionRequest) -> frozenset[str]:
    """The flags that this request turns on."""
    mask = request.mask
    is_on = {
        "bool_mask": mask is not None and mask.dtype == mx.bool_,
        "additive_mask": mask is not None and mask.dtype != mx.bool_,
        "sinks": request.sinks is not None,
        "scores": request.return_scores,
        "lse": request.return_lse,
    }
    return frozenset(flag for flag, on in is_on.items() if on)


@lru_cache(maxsize=64)
def _params(scale: float, mask_threshold: float) -> mx.array:
    """The scalars of a kernel: one short array, the same for all layers of a model."""
    return mx.array([scale, mask_threshold], mx.float32)


def plan(request: AttentionRequest, simdgroups: int | None = None) -> LaunchPlan:
    """The launch that serves a request that was not refused.

    One threadgroup serves one query row, so that neither the number of query heads per key
    head nor Lq is limited by the size of a threadgroup. ``simdgroups`` overrides the choice of
    ``preferred_simdgroups``.
    """
    batch, heads, length, head_size = request.queries.shape
    key_count, value_size = request.keys.shape[2], request.values.shape[3]
    kernel = kernels.resolve("sdpa_vector", flags_of(request))
    if simdgroups is None:
        simdgroups = preferred_simdgroups(head_size, value_size)
    buffers = {
        "queries": request.queries,
        "keys": request.keys,
        "values": request.values,
        "mask": request.mask,
        "sinks": request.sinks,
        "params": _params(request.scale, request.mask_threshold),
    }
    arguments: dict[str, int | bool | mx.Dtype] = {
        "T": request.queries.dtype,
        "D": head_size,
        "V": value_size,
        "NS": simdgroups,
        "CAUSAL": request.causal,
    }
    results: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {
        "out": ((batch, heads, length, value_size), request.queries.dtype),
        "scores": ((batch, heads, length, key_count), mx.float32),
        "lse": ((batch, heads, length), mx.float32),
    }
    inputs = (buffers[name] for name in kernel.inputs)
    return LaunchPlan(
        kernel=kernel,
        inputs=tuple(array for array in inputs if array is not None),
        template=tuple((name, arguments[name]) for name in kernel.template),
        grid=(batch * heads * simdgroups * LANES, length, 1),
        threadgroup=(simdgroups * LANES, 1, 1),
        output_shapes=tuple(results[name][0] for name in kernel.outputs),
        output_dtypes=tuple(results[name][1] for name in kernel.outputs),
    )
