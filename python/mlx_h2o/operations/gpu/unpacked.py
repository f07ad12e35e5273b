"""Packed rows that are unpacked for MLX's own attention, where a machine is faster so."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_h2o.operations.requests import AttentionRequest, AttentionResult, PackedRows

MARGIN = 1.1
"""The kernels stay unless they take this many times as long."""
_TURNS = 5


def serves(request: AttentionRequest) -> bool:
    """Whether MLX's own attention gives what is asked: the output alone, of affine rows."""
    asked = request.return_scores or request.return_lse or request.return_skipped
    hidden = request.mask is not None or request.row_bias is not None
    packed = isinstance(request.keys, PackedRows) and isinstance(request.values, PackedRows)
    return packed and not (asked or hidden or request.has_codes or request.sparse_v_threshold)


def attention(request: AttentionRequest) -> AttentionResult:
    """What the kernels make of the same request."""

    def dense(rows: Any) -> mx.array:
        how = {"group_size": rows.group_size, "bits": rows.bits, "dtype": request.queries.dtype}
        return mx.dequantize(*rows.parts, **how, stream=request.stream)

    out = mx.fast.scaled_dot_product_attention(
        request.queries, dense(request.keys), dense(request.values), scale=request.scale,
        mask="causal" if request.causal else None, sinks=request.sinks, stream=request.stream,
    )  # fmt: skip
    return AttentionResult(out)


def shape_of(request: AttentionRequest) -> tuple[Any, ...]:
    """What the measurement depends on; numbers of rows up to the next power of 2 are one."""
    queries, (*heads, rows, _) = request.queries, request.keys.shape
    near = 1 << (rows - 1).bit_length()
    return near, *heads, queries.dtype, queries.shape, *request.packing.values()


def is_faster(request: AttentionRequest, kernels: Callable[..., AttentionResult]) -> bool:
    """Measured, over rows that are drawn: the best of a few turns, behind one that compiles."""
    near, dtype = shape_of(request)[0], request.queries.dtype

    def drawn(*shape: int) -> mx.array:
        return mx.random.normal(shape, dtype, key=mx.random.key(0))  # the user's draws stay his

    def packed(rows: Any) -> PackedRows:
        dense, size, bits = drawn(*rows.shape[:2], near, rows.shape[3]), rows.group_size, rows.bits
        return PackedRows(tuple(mx.quantize(dense, size, bits)), bits, size)

    def seconds(serve: Callable[..., AttentionResult]) -> float:
        start = time.perf_counter()
        mx.eval(serve(sized).out)
        return time.perf_counter() - start

    keys, values = packed(request.keys), packed(request.values)
    sized = replace(request, queries=drawn(*request.queries.shape), keys=keys, values=values)
    _, *turns = [(seconds(attention), seconds(kernels)) for _ in range(_TURNS + 1)]
    ours, own = (min(times) for times in zip(*turns, strict=True))
    return bool(ours * MARGIN < own)
