"""How an attention request becomes kernel launches, whichever machine runs the kernels.

Nothing here runs anything: ``plan`` names the kernels, their flags, buffers, template arguments
and grids, and the Metal, CUDA and test back ends hand that to MLX in their own way.
"""

from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_h2o.operations.arguments import NUMBERS
from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.gpu.launches import LANES, Launch, LaunchPlan, launch_of, params
from mlx_h2o.operations.requests import MASK_THRESHOLDS, AttentionRequest, PackedRows, are_codes

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
    for name, size in (("D", head_size), ("Dv", request.values.shape[3])):
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


_scalars = attrgetter("scale", *NUMBERS)
_FLAGS = (
    "scores", "lse", "skipped", "row_bias", "dense_keys", "key_codes", "value_codes", *NUMBERS
)  # fmt: skip


def _params(request: AttentionRequest) -> mx.array:
    """The scalars that the kernels read, without zeros at the end."""
    mask, (scale, *numbers) = request.mask, _scalars(request)
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return params(scale, 0.0 if mask is None else MASK_THRESHOLDS[mask.dtype], *numbers)


def _given(request: AttentionRequest) -> dict[str, Any]:
    """The buffers of the request by name; None for those that it does not have."""
    mask, pairs = request.mask, (*request.queries.shape[:3], request.keys.shape[2])
    given = {
        "queries": request.queries, "params": _params(request),
        "mask": None if mask is None else mx.broadcast_to(mask, pairs),
        "sinks": request.sinks, "row_bias": request.row_bias,
    }  # fmt: skip
    for side, rows in (("key", request.keys), ("value", request.values)):
        if not isinstance(rows, PackedRows):
            given[side + "s"] = rows
            continue
        names = (f"{side}_words", f"{side}_scales", f"{side}_biases")
        given |= zip(names, rows.parts, strict=False)
        if are_codes(rows):
            given[f"{side}_levels"] = turbo.codebook(rows.shape[3], rows.bits)
    return given


class Variant(NamedTuple):
    """What the launches for a request depend on: everything except the elements of its arrays."""

    dtype: mx.Dtype
    mask: mx.Dtype | None
    sinks: mx.Dtype | None
    causal: bool
    on: tuple[bool, ...]
    """Which of ``_FLAGS`` are on."""
    head_size: int
    value_size: int
    packing: tuple[Any, ...] | None
    """Dtype of the scales, bits of keys and of values, group size; None: dense rows."""
    queries: tuple[int, ...]
    key_count: int

    @property
    def text(self) -> tuple[Any, ...]:
        """What the compiled text depends on, except the number of simdgroups."""
        return self[:-2]

    @property
    def flags(self) -> frozenset[str]:
        """The flags that are on, including those of numeric options."""
        found = {name for name, is_on in zip(_FLAGS, self.on, strict=True) if is_on}
        if self.mask is not None:
            found.add("bool_mask" if self.mask == mx.bool_ else "additive_mask")
        return frozenset(found if self.sinks is None else {*found, "sinks"})


def variant_of(request: AttentionRequest) -> Variant:
    """The variant of a request that was not refused."""
    queries, keys, values, packing = request.queries, request.keys, request.values, None
    dtype, mask, sinks, kinds = queries.dtype, request.mask, request.sinks, (False, False, False)
    numbers = [number != 0 for number in _scalars(request)[1:]]
    if request.is_packed:
        affine = [r for r in (keys, values) if isinstance(r, PackedRows) and not are_codes(r)]
        scales = affine[0].parts[1].dtype if affine else mx.float32
        packing = scales, *request.packing.values()
        kinds = isinstance(keys, mx.array), are_codes(keys), are_codes(values)
        dtype = mx.float32 if request.has_codes else dtype
    skipped = request.return_skipped and request.sparse_v_threshold > 0
    on = request.return_scores, request.return_lse, skipped, request.row_bias is not None
    return Variant(
        dtype, None if mask is None else mask.dtype, None if sinks is None else sinks.dtype,
        request.causal, (*on, *kinds, *numbers), keys.shape[3], values.shape[3], packing,
        queries.shape, keys.shape[2],
    )  # fmt: skip


def plan(
    request: AttentionRequest,
    simdgroups: int | None = None,
    blocks: int | None = None,
    variant: Variant | None = None,
) -> LaunchPlan:
    """The launches that serve a request that was not refused.

    One threadgroup serves one query row, or a block of its keys, so that neither the number of
    query heads per key head nor Lq is limited by the size of a threadgroup. With sparse V and
    several blocks the first pass is two launches: weights are final between them. ``simdgroups``
    and ``blocks`` override the choices of ``preferred_simdgroups`` and ``preferred_blocks``;
    ``variant`` is that of the request, if it is known already.
    """
    if variant is None:
        variant = variant_of(request)
    if simdgroups is None:
        simdgroups = preferred_simdgroups(variant.head_size, variant.value_size)
    if blocks is None:
        blocks = preferred_blocks(variant.key_count, simdgroups)
    if variant.packing is not None and request.has_codes:
        request = turbo.turned(request)
    return LaunchPlan(_launches(variant, simdgroups, blocks), _given(request))


@lru_cache(maxsize=1024)
def _launches(variant: Variant, simdgroups: int, blocks: int) -> tuple[Launch, ...]:
    """The launches, without buffers: the same in all layers, and at a full budget in all steps."""
    (batch, heads, length, _), flags = variant.queries, variant.flags
    rows, key_count, value_size = (batch, heads, length), variant.key_count, variant.value_size
    arguments: dict[str, Any] = {"T": variant.dtype, "D": variant.head_size, "V": value_size}
    arguments |= {"NS": simdgroups, "CAUSAL": variant.causal}
    if variant.packing is not None:
        arguments |= zip(("S", "KB", "VB", "G"), variant.packing, strict=True)
    made = (
        ("out", (*rows, value_size), variant.dtype),
        ("scores", (*rows, key_count), mx.float32),
        ("lse", rows, mx.float32),
        ("skipped", rows, mx.float32),
        ("partial_sums", (*rows, blocks, value_size), mx.float32),
        ("partial_maxima", (*rows, blocks), mx.float32),
        ("partial_totals", (*rows, blocks), mx.float32),
        ("partial_skipped", (*rows, blocks), mx.float32),
    )
    if "sparse_v_threshold" in flags:
        passes = ("sparse",) if blocks == 1 else ("sparse_keys", "sparse_values")
    else:
        passes = ("",) if blocks == 1 else ("2pass_1",)
    packed = "" if variant.packing is None else "quantized"
    threads = simdgroups * LANES
    each = [
        ("_".join(filter(None, ("sdpa_vector", one, packed))), threads,
         (batch * heads * threads, length, blocks))
        for one in passes
    ]  # fmt: skip
    if blocks > 1:
        columns = (batch * heads * length * value_size, 1, 1)
        each.append(("sdpa_vector_2pass_2", LANES, columns))
    return tuple(
        launch_of(name, grid, threads, made, flags, **arguments) for name, threads, grid in each
    )
