"""How an attention request becomes kernel launches, whichever machine runs the kernels.

Nothing here runs anything: ``plan`` names the kernels, their flags, buffers, template arguments
and grids, and the Metal, CUDA and test back ends hand that to MLX in their own way.
"""

from operator import attrgetter
from typing import Any

import mlx.core as mx

from mlx_h2o.operations.arguments import NUMBERS
from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.gpu.launches import LANES, Launch, LaunchPlan, launch_of, params
from mlx_h2o.operations.requests import MASK_THRESHOLDS, AttentionRequest, are_codes

LONGEST_QUERY = 8
WIDEST_HEAD = 576

# From this many keys on, they are split into blocks.
TWO_PASS_KEYS = 1024
KEYS_OF_A_SIMDGROUP = 16
MOST_BLOCKS = LANES  # a lane of the second pass takes a block


def refuses(request: AttentionRequest) -> str:
    """Why the decode kernels cannot serve this request; empty if they can."""
    length, head_size = request.queries.shape[2:]
    if length > LONGEST_QUERY:
        return f"decode kernels take up to {LONGEST_QUERY} queries, found Lq = {length}"
    for name, size in (("D", head_size), ("Dv", request.value_size)):
        if size % LANES or size > WIDEST_HEAD:
            return (
                f"the kernels take head sizes that are multiples of {LANES} up to {WIDEST_HEAD}, "
                f"found {name} = {size}"
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


_settings = attrgetter(
    "causal", "return_scores", "return_lse", "return_skipped", "bits", "v_bits", "group_size",
    *NUMBERS,
)  # fmt: skip


def kind_of(request: AttentionRequest) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What the launches for a request depend on: everything except the elements of its arrays. The
    compiled text depends on the first part."""
    queries, keys, values = request.queries, request.keys, request.values
    mask, sinks = request.mask, request.sinks
    text = (
        queries.dtype, queries.shape[3], request.value_size,
        (len(keys), keys[1].dtype) if isinstance(keys, tuple) else None,
        (len(values), values[1].dtype) if isinstance(values, tuple) else None,
        mask is None or mask.dtype, sinks is None or sinks.dtype, request.row_bias is None,
        _settings(request),
    )  # fmt: skip
    return text, (queries.shape, request.row_count, request.scale)


def flags_of(request: AttentionRequest) -> frozenset[str]:
    """The flags that are on, including those of numeric options."""
    keys, mask = request.keys, request.mask
    on = {
        "bool_mask": mask is not None and mask.dtype == mx.bool_,
        "additive_mask": mask is not None and mask.dtype != mx.bool_,
        "sinks": request.sinks is not None,
        "scores": request.return_scores,
        "lse": request.return_lse,
        "skipped": request.return_skipped and request.sparse_v_threshold > 0,
        "row_bias": request.row_bias is not None,
        "dense_keys": request.is_packed and isinstance(keys, mx.array),
        "key_codes": are_codes(keys),
        "value_codes": are_codes(request.values),
    }
    on |= {name: getattr(request, name) != 0 for name in NUMBERS}
    return frozenset(name for name, is_on in on.items() if is_on)


def plan(
    request: AttentionRequest, simdgroups: int | None = None, blocks: int | None = None
) -> LaunchPlan:
    """The launches that serve a request that was not refused, and all their buffers."""
    given = buffers(request) | constants(request)
    return LaunchPlan(passes(request, simdgroups, blocks), given)


def constants(request: AttentionRequest) -> dict[str, mx.array]:
    """The buffers that all requests of a kind share: the scalars that the kernels read, and the
    levels of codes."""
    mask, numbers = request.mask, [getattr(request, name) for name in NUMBERS]
    threshold = 0.0 if mask is None else MASK_THRESHOLDS[mask.dtype]
    while numbers and numbers[-1] == 0:  # as in C
        numbers.pop()
    found = {"params": params(request.scale, threshold, *numbers)}
    if are_codes(request.keys):
        found["key_levels"] = turbo.codebook(request.queries.shape[3], request.bits)
    if are_codes(request.values):
        found["value_levels"] = turbo.codebook(request.value_size, request.v_bits)
    return found


def buffers(request: AttentionRequest) -> dict[str, Any]:
    """The other buffers by name; None for those that the request does not have."""
    if request.has_codes:
        request = turbo.turned(request)
    queries, mask = request.queries, request.mask
    given: dict[str, Any] = {
        "queries": queries, "mask": mask, "sinks": request.sinks, "row_bias": request.row_bias
    }  # fmt: skip
    if mask is not None:
        given["mask"] = mx.broadcast_to(mask, (*queries.shape[:3], request.row_count))
    for side, rows in (("key", request.keys), ("value", request.values)):
        if isinstance(rows, tuple):
            names = (f"{side}_words", f"{side}_scales", f"{side}_biases")
            given |= zip(names, rows, strict=False)
        else:
            given[side + "s"] = rows
    return given


def passes(
    request: AttentionRequest, simdgroups: int | None = None, blocks: int | None = None
) -> tuple[Launch, ...]:
    """The launches, without buffers.

    One threadgroup serves one query row, or a block of its keys, so that neither the number of
    query heads per key head nor Lq is limited by the size of a threadgroup. With sparse V and
    several blocks the first pass is two launches: weights are final between them. ``simdgroups``
    and ``blocks`` override the choices of ``preferred_simdgroups`` and ``preferred_blocks``.
    """
    (batch, heads, length, size), flags = request.queries.shape, flags_of(request)
    rows, value_size = (batch, heads, length), request.value_size
    simdgroups = simdgroups or preferred_simdgroups(size, value_size)
    blocks = blocks or preferred_blocks(request.row_count, simdgroups)
    dtype = mx.float32 if request.has_codes else request.queries.dtype
    sides = request.keys, request.values
    affine = [rows for rows in sides if isinstance(rows, tuple) and len(rows) == 3]
    arguments: dict[str, Any] = {
        "T": dtype, "S": affine[0][1].dtype if affine else mx.float32, "D": size, "V": value_size,
        "KB": request.bits, "VB": request.v_bits, "G": request.group_size, "NS": simdgroups,
        "CAUSAL": request.causal,
    }  # fmt: skip
    made = (
        ("out", (*rows, value_size), dtype),
        ("scores", (*rows, request.row_count), mx.float32),
        ("lse", rows, mx.float32),
        ("skipped", rows, mx.float32),
        ("partial_sums", (*rows, blocks, value_size), mx.float32),
        ("partial_maxima", (*rows, blocks), mx.float32),
        ("partial_totals", (*rows, blocks), mx.float32),
        ("partial_skipped", (*rows, blocks), mx.float32),
    )
    if request.sparse_v_threshold > 0:
        sweeps = ("sparse",) if blocks == 1 else ("sparse_keys", "sparse_values")
    else:
        sweeps = ("",) if blocks == 1 else ("2pass_1",)
    packed = "quantized" if request.is_packed else ""
    threads = simdgroups * LANES
    each = [
        ("_".join(filter(None, ("sdpa_vector", one, packed))), threads,
         (batch * heads * threads, length, blocks))
        for one in sweeps
    ]  # fmt: skip
    if blocks > 1:
        columns = (batch * heads * length * value_size, 1, 1)
        each.append(("sdpa_vector_2pass_2", LANES, columns))
    return tuple(
        launch_of(name, grid, threads, made, flags, **arguments) for name, threads, grid in each
    )
