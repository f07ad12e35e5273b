"""MLX's own attention, used for chunks, and for steps over packed rows where it is faster."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx

from mlx_h2o.operations.arguments import NUMBERS
from mlx_h2o.operations.composed import masked
from mlx_h2o.operations.gpu.launch import LONGEST_QUERY
from mlx_h2o.operations.requests import (
    MASK_THRESHOLDS,
    AttentionRequest,
    AttentionResult,
    first_part,
    in_blocks,
)

MARGIN = 1.1
"""MLX's attention replaces the kernels only if they take more than this many times as long."""
_TURNS = 5


def is_chunk(request: AttentionRequest) -> bool:
    """Whether the request has more queries than the decode kernels take."""
    return request.queries.shape[2] > LONGEST_QUERY


def serves(request: AttentionRequest) -> bool:
    """Whether MLX's own attention can serve the request, which must need the output alone."""
    asked = request.return_scores or request.return_lse or request.return_skipped
    bias, mask = request.row_bias, request.mask
    if asked or request.has_codes or any(getattr(request, name) for name in NUMBERS):
        return False
    if is_chunk(request):
        hides = bias is not None and request.bias_masks
        return not hides and (mask is None or mask.dtype == mx.bool_)
    packed = isinstance(request.keys, tuple) and isinstance(request.values, tuple)
    return packed and mask is None and bias is None


def attention(request: AttentionRequest) -> AttentionResult:
    """The same result as that of the kernels or of composed."""
    dtype, sinks = request.queries.dtype, request.sinks

    def dense(rows: Any, bits: int) -> Any:
        if isinstance(rows, mx.array):
            return rows
        how: dict[str, Any] = {"group_size": request.group_size, "bits": bits, "dtype": dtype}
        return mx.dequantize(*rows, **how)

    def attend(part: Any, mask: Any) -> AttentionResult:
        rows = part.queries, part.keys, part.values
        given = {"scale": part.scale, "mask": mask, "sinks": sinks}
        return AttentionResult(mx.fast.scaled_dot_product_attention(*rows, **given))

    sinks = None if sinks is None else sinks.astype(dtype)
    keys, values = dense(request.keys, request.bits), dense(request.values, request.v_bits)
    request = replace(request, keys=keys, values=values)
    if request.mask is None and request.row_bias is None:
        return attend(request, "causal" if request.causal else None)
    whole = replace(masked(request), row_bias=_biases(request))
    return in_blocks(whole, lambda part: attend(part, _added(part)))


def _biases(request: AttentionRequest) -> mx.array:
    """The bias of each row for each query head, in the dtype of the queries."""
    (heads, rows), bias = first_part(request.keys).shape[1:3], request.row_bias
    bias = mx.zeros((1, heads, rows)) if bias is None else bias[:, :, :rows]
    return mx.repeat(bias.astype(request.queries.dtype), request.queries.shape[1] // heads, axis=1)


def _added(part: AttentionRequest) -> mx.array:
    """Mask and biases as one additive mask, [B, Hq, Lq or 1, N]. Masked pairs get half the lowest
    number, which stays finite when kernels multiply it by log2(e): a query that sees nothing gets a
    mean, never NaN."""
    bias = mx.expand_dims(cast(mx.array, part.row_bias), 2)
    return bias if part.mask is None else mx.where(part.mask, bias, MASK_THRESHOLDS[bias.dtype])


def shape_of(request: AttentionRequest) -> tuple[Any, ...]:
    """What the measurement depends on, with the number of rows rounded up to a power of 2."""
    queries, (*heads, rows, _) = request.queries, first_part(request.keys).shape
    packing = request.bits, request.v_bits, request.group_size
    return (rows - 1).bit_length(), *heads, queries.dtype, queries.shape, packing


def is_faster(request: AttentionRequest, kernels: Callable[..., AttentionResult]) -> bool:
    """Whether MLX's attention is faster: the best of a few turns, after one that compiles."""

    def seconds(serve: Callable[..., AttentionResult]) -> float:
        start = time.perf_counter()
        mx.eval(serve(request).out)
        return time.perf_counter() - start

    _, *turns = [(seconds(attention), seconds(kernels)) for _ in range(_TURNS + 1)]
    ours, own = (min(times) for times in zip(*turns, strict=True))
    return bool(ours * MARGIN < own)
