"""Compare every operation on the machine's back end with plain MLX operations on its CPU."""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .. import fast
from ..config import KV_FORMATS
from ..operations.arguments import CODE_BITS
from ..operations.backends import resolve, use_backend
from ..operations.composed import folding, turbo

ALLOWED = {mx.float32: 5e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
"""Allowed error of a result, relative to the greatest expected one or to 1: sums run in another
order, and the result is rounded to its dtype once."""

OperationCase = tuple[str, str, Callable[[], Any]]
"""The name of an operation, the name of the case, and the call."""
_MASKS = ("no", "causal", "bool", "additive")
_PACKED = ((8, 8, 64), (6, 5, 64), (4, 3, 32), (2, 2, 128))
_CODES = ("turbo3", "turbo8v3", "turbo0v4")


def operation_cases() -> Iterator[OperationCase]:
    """A few cases of each operation: every kernel, dtype, mask, and kind of rows."""
    random = np.random.default_rng(0)

    def draw(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.array(random.standard_normal(shape, np.float32)).astype(dtype)

    dtypes = itertools.cycle(ALLOWED)
    # Attention in one pass, and in two.
    for rows, (at, mask) in itertools.product((99, 3001), enumerate(_MASKS)):
        dtype, name = next(dtypes), f"{rows} rows, {mask} mask"
        q = draw(1, 4, 3, 128, dtype=dtype)
        k, v = draw(1, 2, rows, 128, dtype=dtype), draw(1, 2, rows, 128, dtype=dtype)
        seen = mx.array(random.random((3, rows)) < 0.8)
        added = mx.where(seen, 0.5, -math.inf).astype(dtype)
        given: dict[str, Any] = {
            "scale": 128**-0.5,
            "mask": {"no": None, "causal": "causal", "bool": seen, "additive": added}[mask],
            "sinks": draw(4, dtype=dtype) if at else None,
            "row_bias": mx.abs(draw(1, 2, rows)) if at % 2 else None,
        }
        yield _case(fast.scaled_dot_product_attention_with_scores, name, q, k, v,
                    return_lse=True, **given)  # fmt: skip
        for kind in ("ema", "mass"):
            yield _case(fast.prefill_scores, f"{kind}, {name}", q, k, kind=kind, **given)
            yield _case(fast.attention_and_accumulate, f"{kind}, {name}", q, k, v,
                        draw(1, 2, rows), kind=kind, **given)  # fmt: skip
        bits, v_bits, size = _PACKED[at]
        packed = (*mx.quantize(k, size, bits), *mx.quantize(v, size, v_bits))
        how: dict[str, Any] = {"bits": bits, "v_bits": v_bits, "group_size": size}
        yield from _quantized(f"{bits} and {v_bits} bits, {name}", (q, *packed), given | how)
        if at < len(_CODES):
            bits, v_bits = KV_FORMATS[_CODES[at]]
            keys: Any = mx.quantize(k, bits=8) if bits == 8 else (k, None, None)
            if bits in CODE_BITS:
                keys = (*turbo.encode_rows(k, bits, turbo.KEYS), None)
            coded = (*keys, *turbo.encode_rows(v, v_bits, turbo.VALUES), None)
            how = {"bits": bits or 8, "v_bits": v_bits}
            yield from _quantized(f"{_CODES[at]}, {name}", (q, *coded), given | how)
    for dtype, rows, bits in zip(ALLOWED, (3, 24, 99), CODE_BITS, strict=True):
        ranks, positions = draw(1, 2, rows), mx.arange(rows, dtype=mx.int32)
        yield _case(fast.accumulate_scores, f"{rows} rows", ranks, draw(1, 4, 3, rows), decay=0.9)
        yield _case(fast.keep_indices, f"{rows} rows", ranks,
                    mx.broadcast_to(positions, ranks.shape), keep=rows // 2 + 1, sink_size=1,
                    recent_start=rows - 1)  # fmt: skip
        keys, values = (draw(1, 2, rows, 128, dtype=dtype) for _ in range(2))
        yield _case(fast.key_diversity, f"{rows} rows", keys)
        slots = mx.broadcast_to(mx.array([1, 0], mx.uint32), (1, 2, 2))
        new = keys[:, :, -2:], values[:, :, -2:]
        for width, size in ((bits, 32), (2 * bits, 64)):
            stored = (tuple(mx.quantize(one, size, width)) for one in (keys, values))
            yield _case(fast.quantize_append, f"{width} bits", *stored, *new, slots, bits=width,
                        group_size=size)  # fmt: skip
        codes = turbo.encode_rows(keys, bits, turbo.KEYS)
        yield _case(turbo.encode_rows, f"{bits} bits", keys, bits, turbo.KEYS)
        yield _case(turbo.decode_rows, f"{bits} bits", *codes, bits, turbo.KEYS, mx.float32)
        beside = [mx.abs(draw(1, 2, rows)) for _ in range(3)]
        kept = mx.broadcast_to(mx.arange(1, rows, dtype=mx.uint32), (1, 2, rows - 1))
        yield _case(folding.fold, f"{rows} rows", keys, values, *beside,
                    mx.ones(ranks.shape, mx.bool_), kept)  # fmt: skip


def _case(operation: Any, name: str, *given: Any, **more: Any) -> OperationCase:
    called = operation.__name__

    def call() -> Any:
        # Operations that only caches use are not public.
        served = operation if hasattr(fast, called) else getattr(resolve(), called)
        return served(*given, **more)

    dtype = next(one for one in given if isinstance(one, mx.array)).dtype
    return called, f"{called}, {name}, {str(dtype)[9:]}", call


def _quantized(name: str, given: tuple[Any, ...], more: dict[str, Any]) -> Iterator[OperationCase]:
    call = partial(_case, fast.scaled_dot_product_attention_quantized_with_scores)
    yield call(name, *given, return_lse=True, **more)
    # Every other row has next to no weight, and no weight is near the threshold.
    rows = given[1].shape[2]
    bias = mx.broadcast_to(mx.where(mx.arange(rows) % 2, 0.0, -40.0), (1, 2, rows))
    more = more | {"row_bias": bias, "sparse_v_threshold": 1e-10, "return_skipped": True}
    yield call(f"sparse V, {name}", *given, **more)


def compare(backend: str) -> dict[str, Any]:
    """Check each operation on the back end of this name: the number of cases, and the worst error
    relative to what is allowed. Cases above 1, and those that raise, are ``failed``."""
    operations: dict[str, dict[str, Any]] = {}
    failed = []
    for operation, name, call in operation_cases():
        try:
            worst, said = _worst(operation, call, backend), ""
        except (RuntimeError, ValueError) as error:
            worst, said = math.inf, f": {error}"
        if not worst <= 1:
            failed.append(f"{name}: {worst:.3g} of what is allowed{said}")
        found = operations.setdefault(operation, {"cases": 0, "worst": 0.0})
        found["cases"] += 1
        found["worst"] = round(max(found["worst"], min(worst, 1e9)), 3)
    return {"backend": backend, "operations": operations, "failed": failed}


def _worst(operation: str, call: Callable[[], Any], backend: str) -> float:
    same = operation == "quantize_append"  # bit for bit what the device itself packs
    with use_backend(backend):
        mx.eval(found := call())
    with use_backend("composed"), mx.stream(mx.default_device() if same else mx.cpu):
        mx.eval(expected := call())
    pairs = zip(*(cast(Any, tree_flatten)(one) for one in (found, expected)), strict=True)
    return max(_error(one, other, same) for (_, one), (_, other) in pairs)


def _error(found: mx.array, expected: mx.array, same: bool) -> float:
    """The error relative to what is allowed; codes and indices must be equal."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    numbers = found.dtype in ALLOWED
    a, b = (np.array(x.astype(mx.float32) if numbers else x, float) for x in (found, expected))
    with np.errstate(invalid="ignore"):
        off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    if not off.any():
        return 0.0
    most = np.abs(b[np.isfinite(b)]).max(initial=1.0) * ALLOWED.get(found.dtype, 0.0)
    return math.inf if same or not numbers or np.isnan(off).any() else float(off.max() / most)
