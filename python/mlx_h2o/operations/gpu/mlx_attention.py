"""What MLX's own attention serves: a chunk, and a step over packed rows where that is faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_h2o.operations.arguments import placed
from mlx_h2o.operations.composed import causal_mask
from mlx_h2o.operations.gpu.launch import LONGEST_QUERY
from mlx_h2o.operations.requests import AttentionRequest, AttentionResult, PackedRows

MARGIN = 1.1
"""The kernels stay unless they take this many times as long."""
_TURNS = 5


def is_chunk(request: AttentionRequest) -> bool:
    """Whether it has more queries than the kernels of decoding take."""
    return request.queries.shape[2] > LONGEST_QUERY


def serves(request: AttentionRequest) -> bool:
    """Whether MLX's own attention gives what is asked: the output alone."""
    asked = request.return_scores or request.return_lse or request.return_skipped
    bias, mask = request.row_bias, request.mask
    if asked or request.has_codes or request.sparse_v_threshold:
        return False
    if is_chunk(request):
        hides = bias is not None and request.bias_masks
        return not hides and (mask is None or mask.dtype == mx.bool_)
    packed = isinstance(request.keys, PackedRows) and isinstance(request.values, PackedRows)
    return packed and mask is None and bias is None


def attention(request: AttentionRequest) -> AttentionResult:
    """What the kernels, or the composition, make of the same request."""
    dtype = request.queries.dtype

    def dense(rows: Any) -> Any:
        if isinstance(rows, mx.array):
            return rows
        how: dict[str, Any] = {"group_size": rows.group_size, "bits": rows.bits, "dtype": dtype}
        return mx.dequantize(*rows.parts, **how)

    with placed(request.stream):
        mask: Any = "causal" if request.causal else None
        if request.mask is not None or request.row_bias is not None:
            mask = _added(request)
        out = mx.fast.scaled_dot_product_attention(
            request.queries, dense(request.keys), dense(request.values), scale=request.scale,
            mask=mask, sinks=request.sinks,
        )  # fmt: skip
    return AttentionResult(out)


def _added(request: AttentionRequest) -> mx.array:
    """Mask and biases as numbers to add, [B, Hq, Lq or 1, N], in the dtype of the queries. Hidden
    pairs have the lowest one: a query that sees nothing gets a mean, never NaN."""
    rows, seen = request.keys.shape[2], causal_mask(request) if request.causal else request.mask
    bias, dtype = mx.zeros(1), request.queries.dtype
    if request.row_bias is not None:
        group = request.queries.shape[1] // request.row_bias.shape[1]
        bias = mx.repeat(request.row_bias[:, :, None, :rows], group, axis=1)
    bias = bias.astype(dtype)
    return bias if seen is None else mx.where(seen, bias, mx.finfo(dtype).min)


def shape_of(request: AttentionRequest) -> tuple[Any, ...]:
    """What the measurement depends on; numbers of rows up to the next power of 2 are one."""
    queries, (*heads, rows, _) = request.queries, request.keys.shape
    near = (rows - 1).bit_length()
    return near, *heads, queries.dtype, queries.shape, *request.packing.values()


def is_faster(request: AttentionRequest, kernels: Callable[..., AttentionResult]) -> bool:
    """Measured: the best of a few turns, behind one that compiles."""

    def seconds(serve: Callable[..., AttentionResult]) -> float:
        start = time.perf_counter()
        mx.eval(serve(request).out)
        return time.perf_counter() - start

    _, *turns = [(seconds(attention), seconds(kernels)) for _ in range(_TURNS + 1)]
    ours, own = (min(times) for times in zip(*turns, strict=True))
    return bool(ours * MARGIN < own)
