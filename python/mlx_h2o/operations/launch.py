"""How an attention request becomes kernel launches, whichever machine runs the kernels.

Nothing here runs anything: ``plan`` names the kernels, their flags, buffers, template arguments
and grids, and the Metal, CUDA and test back ends hand that to MLX in their own way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mlx.core as mx

from mlx_h2o.operations import kernels
from mlx_h2o.operations.kernels import Kernel
from mlx_h2o.operations.requests import AttentionRequest, AttentionResult, QuantizedRows

LANES = 32  # threads of a simdgroup
LONGEST_QUERY = 8
WIDEST_HEAD = 576

# From here on the keys are split into blocks.
TWO_PASS_KEYS = 1024
KEYS_OF_A_SIMDGROUP = 16
MOST_BLOCKS = LANES  # a lane of the second pass takes a block

TemplateArgument = tuple[str, int | bool | mx.Dtype]
TemplateArguments = Mapping[str, int | bool | mx.Dtype]
Triple = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch: what ``mx.fast.metal_kernel`` and its kernel object are called with.

    ``given`` holds the buffers that come with the request, by name.
    """

    kernel: Kernel
    given: Mapping[str, mx.array]
    template: tuple[TemplateArgument, ...]
    grid: Triple
    threadgroup: Triple
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]

    def inputs(self, made: Mapping[str, mx.array]) -> list[mx.array]:
        """The inputs in order, given what earlier passes have made."""
        return [
            self.given[name] if name in self.given else made[name] for name in self.kernel.inputs
        ]

    def call(self) -> dict[str, Any]:
        """The arguments of the kernel object, but for the inputs and the stream."""
        return {
            "template": list(self.template),
            "grid": self.grid,
            "threadgroup": self.threadgroup,
            "output_shapes": list(self.output_shapes),
            "output_dtypes": list(self.output_dtypes),
        }


Results = Mapping[str, tuple[tuple[int, ...], mx.Dtype]]
"""Shape and dtype of what a kernel makes, by name."""


def launch_of(
    name: str,
    flags: frozenset[str],
    given: Mapping[str, mx.array],
    arguments: TemplateArguments,
    grid: Triple,
    threads: int,
    results: Results,
) -> Launch:
    """The launch of a kernel, which takes by name what it wants of all that is there."""
    kernel = kernels.resolve(name, flags)
    return Launch(
        kernel=kernel,
        given={name: given[name] for name in kernel.inputs if name in given},
        template=tuple((name, arguments[name]) for name in kernel.template),
        grid=grid,
        threadgroup=(threads, 1, 1),
        output_shapes=tuple(results[name][0] for name in kernel.outputs),
        output_dtypes=tuple(results[name][1] for name in kernel.outputs),
    )


Execute = Callable[[Launch, list[mx.array]], list[mx.array]]


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """The launches that serve a request, in order; a later one takes what the earlier made.

    ``scratch`` names what they make for each other alone; ``known`` is what needs no launch.
    """

    passes: tuple[Launch, ...]
    scratch: frozenset[str] = frozenset()
    known: Mapping[str, mx.array] = field(default_factory=dict)

    def run(self, execute: Execute) -> AttentionResult:
        """``execute`` each launch; None where something was not asked for."""
        made = self.outputs(execute)
        return AttentionResult(made["out"], *map(made.get, AttentionResult._fields[1:]))

    def outputs(self, execute: Execute) -> dict[str, mx.array]:
        """``execute`` each launch; everything that was made but scratch, by name."""
        made: dict[str, mx.array] = dict(self.known)
        for launch in self.passes:
            outputs = execute(launch, launch.inputs(made))
            made.update(zip(launch.kernel.outputs, outputs, strict=True))
        return {name: array for name, array in made.items() if name not in self.scratch}


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


def preferred_blocks(key_count: int, simdgroups: int) -> int:
    """Blocks of keys, each with a threadgroup of its own; 1 means one pass.

    Below ``TWO_PASS_KEYS`` one threadgroup per query row is fast enough. Above, a simdgroup gets
    at least ``KEYS_OF_A_SIMDGROUP`` keys, and the number is a power of two, at most
    ``MOST_BLOCKS``. It depends on the length of the cache and on the kernel, and on nothing
    else: a sequence gets the same bits alone and in a batch, and its partial results change
    their size rarely, which suits the allocator.
    """
    if key_count < TWO_PASS_KEYS:
        return 1
    most = max(2, key_count // (KEYS_OF_A_SIMDGROUP * simdgroups))
    return min(MOST_BLOCKS, 1 << (most.bit_length() - 1))


def is_sparse(request: AttentionRequest) -> bool:
    """Whether value rows of little weight are left out, which takes kernels of its own."""
    return request.sparse_v_threshold > 0


def flags_of(request: AttentionRequest) -> frozenset[str]:
    """The flags that this request turns on."""
    mask = request.mask
    is_on = {
        "bool_mask": mask is not None and mask.dtype == mx.bool_,
        "additive_mask": mask is not None and mask.dtype != mx.bool_,
        "sinks": request.sinks is not None,
        "scores": request.return_scores,
        "lse": request.return_lse,
        "skipped": is_sparse(request) and request.return_skipped,
        "probes": request.probes is not None,
    }
    return frozenset(flag for flag, on in is_on.items() if on)


@lru_cache(maxsize=64)
def params(*numbers: float) -> mx.array:
    """The scalars of a kernel: one short array, the same for all layers of a model."""
    return mx.array(numbers, mx.float32)


def _given(request: AttentionRequest) -> dict[str, mx.array]:
    """The buffers that come with the request."""
    given = {"queries": request.queries, "params": params(request.scale, request.mask_threshold)}
    if is_sparse(request):
        scalars = (request.scale, request.mask_threshold, request.sparse_v_threshold)
        given["params"] = params(*scalars)
    for name, rows in (("key", request.keys), ("value", request.values)):
        if isinstance(rows, QuantizedRows):
            given[f"{name}_words"] = rows.words
            given[f"{name}_scales"] = rows.scales
            given[f"{name}_biases"] = rows.biases
        else:
            given[f"{name}s"] = rows
    optional = {"mask": request.mask, "sinks": request.sinks, "probes": request.probes}
    return given | {name: array for name, array in optional.items() if array is not None}


def _arguments(request: AttentionRequest, simdgroups: int) -> TemplateArguments:
    arguments: dict[str, int | bool | mx.Dtype] = {
        "T": request.queries.dtype,
        "D": request.queries.shape[3],
        "V": request.values.shape[3],
        "NS": simdgroups,
        "CAUSAL": request.causal,
    }
    if isinstance(request.keys, QuantizedRows) and isinstance(request.values, QuantizedRows):
        arguments["S"] = request.keys.scales.dtype
        arguments["KB"] = request.keys.bits
        arguments["VB"] = request.values.bits
        arguments["G"] = request.keys.group_size
    return arguments


def plan(
    request: AttentionRequest, simdgroups: int | None = None, blocks: int | None = None
) -> LaunchPlan:
    """The launches that serve a request that was not refused.

    One threadgroup serves one query row, or a block of its keys, so that neither the number of
    query heads per key head nor Lq is limited by the size of a threadgroup. With sparse V and
    several blocks the first pass is two launches: weights are final between them. ``simdgroups``
    and ``blocks`` override the choices of ``preferred_simdgroups`` and ``preferred_blocks``.
    """
    batch, heads, length, head_size = request.queries.shape
    key_count, value_size = request.keys.shape[2], request.values.shape[3]
    if simdgroups is None:
        simdgroups = preferred_simdgroups(head_size, value_size)
    if blocks is None:
        blocks = preferred_blocks(key_count, simdgroups)
    flags = flags_of(request)
    given = _given(request)
    arguments = _arguments(request, simdgroups)
    rows = (batch, heads, length)
    probes = 0 if request.probes is None else request.probes.shape[2]
    results: Results = {
        "out": ((*rows, value_size), request.queries.dtype),
        "scores": ((*rows, key_count), mx.float32),
        "lse": (rows, mx.float32),
        "skipped": (rows, mx.float32),
        "probe_scores": ((batch, request.keys.shape[1], probes, key_count), mx.float32),
        "partial_sums": ((*rows, blocks, value_size), mx.float32),
        "partial_maxima": ((*rows, blocks), mx.float32),
        "partial_totals": ((*rows, blocks), mx.float32),
        "partial_skipped": ((*rows, blocks), mx.float32),
    }

    def launch(name: str, grid: Triple, threads: int) -> Launch:
        return launch_of(name, flags, given, arguments, grid, threads, results)

    threads = simdgroups * LANES
    grid = (batch * heads * threads, length, blocks)
    launches = [launch(name, grid, threads) for name in _decode_kernels(request, blocks)]
    if blocks > 1:
        columns = (batch * heads * length * value_size, 1, 1)
        launches.append(launch("sdpa_vector_2pass_2", columns, LANES))
    known = {}
    if request.return_skipped and "skipped" not in flags:
        known["skipped"] = mx.zeros(rows, stream=request.stream)
    # The sweep over the values takes the logits from memory, whoever asked for them.
    scratch = frozenset(() if request.return_scores else ("scores",))
    return LaunchPlan(tuple(launches), scratch, known)


def _decode_kernels(request: AttentionRequest, blocks: int) -> tuple[str, ...]:
    """The kernels that see keys and values, in order."""
    if is_sparse(request):
        if blocks == 1:
            return ("sdpa_vector_sparse_quantized",)
        return ("sdpa_vector_sparse_keys_quantized", "sdpa_vector_sparse_values_quantized")
    first = "sdpa_vector" if blocks == 1 else "sdpa_vector_2pass_1"
    return (f"{first}_quantized",) if request.is_packed else (first,)
