"""Wrong calls of the operations: what is changed of a right one, and how the error begins.

Python's own words, which the native module and C repeat.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

ATTENTION = "scaled_dot_product_attention_with_scores"
QUANTIZED = "scaled_dot_product_attention_quantized_with_scores"
HALF, INT, UINT = mx.float16, mx.int32, mx.uint32
Q, K, V, ROWS = (1, 4, 2, 64), (1, 2, 5, 64), (1, 2, 5, 24), (1, 2, 5)


def z(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.zeros(shape, dtype)


def pack(*shape: int, bits: int = 8, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, ...]:
    return tuple(mx.quantize(mx.zeros(shape, dtype), bits=bits, group_size=64))


def codes(bits: int) -> tuple[mx.array, ...]:
    """Words and norms of so many bits."""
    return z(*ROWS, 2 * bits, dtype=UINT), z(*ROWS, 1)


def k(parts: tuple[mx.array | None, ...]) -> dict[str, Any]:
    return dict(zip(("k_w", "k_s", "k_b"), (*parts, None, None)[:3], strict=True))


def v(parts: tuple[mx.array | None, ...]) -> dict[str, Any]:
    return dict(zip(("v_w", "v_s", "v_b"), (*parts, None, None)[:3], strict=True))


WORDS, SCALES, _ = pack(*K)

RIGHT: dict[str, dict[str, Any]] = {
    ATTENTION: {"q": z(*Q), "k": z(*K), "v": z(*V), "scale": 0.5},
    QUANTIZED: {"q": z(*Q), **k(pack(*K)), **v(pack(*K)), "scale": 1.0},
    "keep_indices": {"scores": z(*ROWS), "positions": z(*ROWS, dtype=INT), "keep": 2},
    "accumulate_scores": {"importance": z(*ROWS), "scores": z(1, 4, 1, 5), "decay": 0.5},
    "key_diversity": {"keys": z(*K)},
    "attention_and_accumulate": {
        "q": z(*Q), "k": z(*K), "v": z(*K), "importance": z(*ROWS), "scale": 1.0, "decay": 0.5,
    },
    "quantize_append": {
        "quantised_keys": pack(*K), "quantised_values": pack(*K),
        "new_keys": z(1, 2, 3, 64), "new_values": z(1, 2, 3, 64), "slots": z(1, 2, 3, dtype=UINT),
    },
    "prefill_scores": {"q": z(*Q), "k": z(*K), "scale": 1.0},
}  # fmt: skip

FLOATS = "float32, float16 or bfloat16"
FREE = "every size at least 1"
QUERIES = f"expected {FLOATS} [B, Hq, Lq, D], {FREE}"
KEYS = f"expected float32 [B, Hkv, N, D] = (1, Hkv, N, 64), {FREE}, Hkv a divisor of Hq = 4."
VALUES = f"expected float32 [B, Hkv, N, Dv] = (1, 2, 5, Dv), {FREE}."
MASK = f"expected bool, {FLOATS} that broadcasts to [B, Hq, Lq, N] = (1, 4, 2, 5)."
SINKS = f"expected {FLOATS} [Hq] = (4,)."
OF_ROWS = "expected float32 [B, Hkv, N] = (1, 2, 5)."
FINITE, DECAY = "expected a finite number.", "expected at least 0 and below 1."
BITS = "expected one of (2, 3, 4, 5, 6, 8)."
KEY_WORDS = f"expected uint32 [B, Hkv, N, D * bits / 32] = (1, Hkv, N, 16), {FREE}, Hkv a divisor"
VALUE_WORDS = "expected uint32 [B, Hkv, N, Dv * v_bits / 32] = (1, 2, 5, Dv * v_bits / 32)"

_SHARED: tuple[tuple[str, dict[str, Any]], ...] = (
    # Of queries beside keys of 64 elements in two heads of five rows.
    (f"queries are float32 (4, 2, 64), {QUERIES}", {"q": z(4, 2, 64)}),
    (f"queries are float32 (1, 4, 0, 64), {QUERIES}", {"q": z(1, 4, 0, 64)}),
    (f"queries are int32 (1, 4, 2, 64), {QUERIES}", {"q": z(*Q, dtype=INT)}),
    (f"scale is nan, {FINITE}", {"scale": math.nan}),
    (f"scale is inf, {FINITE}", {"scale": math.inf}),
    (f"scale is -inf, {FINITE}", {"scale": -math.inf}),
    (f"mask is float32 (2, 6), {MASK}", {"mask": z(2, 6)}),
    (f"mask is int32 (2, 5), {MASK}", {"mask": z(2, 5, dtype=INT)}),
    (f"mask is bool (3, 1, 5), {MASK}", {"mask": z(3, 1, 5, dtype=mx.bool_)}),
    (f"mask is bool (1, 1, 4, 2, 5), {MASK}", {"mask": z(1, 1, 4, 2, 5, dtype=mx.bool_)}),
    (f"mask is float32 (0,), {MASK}", {"mask": z(0)}),
    (f"sinks are float32 (3,), {SINKS}", {"sinks": z(3)}),
    (f"sinks are float32 (1, 4), {SINKS}", {"sinks": z(1, 4)}),
    (f"sinks are float32 (), {SINKS}", {"sinks": z()}),
    (f"sinks are int32 (4,), {SINKS}", {"sinks": z(4, dtype=INT)}),
    (f"row_bias is float32 (1, 4, 5), {OF_ROWS}", {"row_bias": z(1, 4, 5)}),
    (f"row_bias is float32 (1, 2, 4), {OF_ROWS}", {"row_bias": z(1, 2, 4)}),
    (f"row_bias is float32 (2, 5), {OF_ROWS}", {"row_bias": z(2, 5)}),
    (f"row_bias is float16 (1, 2, 5), {OF_ROWS}", {"row_bias": z(*ROWS, dtype=HALF)}),
    (f"row_bias is int32 (1, 2, 5), {OF_ROWS}", {"row_bias": z(*ROWS, dtype=INT)}),
)

_WRONG: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    ATTENTION: (
        ("queries are float32 (0, 4, 2, 64)", {"q": z(0, *Q[1:]), "k": z(0, *K[1:])}),
        (f"keys are float32 (1, 1, 2, 5, 64), {KEYS}", {"k": z(1, *K)}),
        ("keys are float32 (1, 2, 0, 64)", {"k": z(1, 2, 0, 64), "v": z(1, 2, 0, 24)}),
        ("keys are float32 (1, 2, 5, 64), expected float32 [B, Hkv, N, D] = (2, Hkv, N, 64)",
         {"q": z(2, 4, 2, 64)}),
        ("keys are float32 (1, 2, 5, 64), expected float32 [B, Hkv, N, D] = (1, Hkv, N, 16)",
         {"q": z(1, 4, 2, 16)}),
        (f"keys are float32 (1, 2, 5, 64), {KEYS[:-2]}3.", {"q": z(1, 3, 2, 64)}),
        (f"keys are float32 (1, 2, 5, 64), {KEYS[:-2]}1.", {"q": z(1, 1, 2, 64)}),
        (f"keys are bool (1, 2, 5, 64), {KEYS}", {"k": z(*K, dtype=mx.bool_)}),
        (f"keys are float16 (1, 2, 5, 64), {KEYS}", {"k": z(*K, dtype=HALF)}),
        (f"values are float32 (24,), {VALUES}", {"v": z(24)}),
        (f"values are float32 (1, 2, 5, 0), {VALUES}", {"v": z(1, 2, 5, 0)}),
        (f"values are float32 (3, 2, 5, 24), {VALUES}", {"v": z(3, 2, 5, 24)}),
        (f"values are float32 (1, 1, 5, 24), {VALUES}", {"v": z(1, 1, 5, 24)}),
        (f"values are float32 (1, 2, 6, 24), {VALUES}", {"v": z(1, 2, 6, 24)}),
        (f"values are complex64 (1, 2, 5, 24), {VALUES}", {"v": z(*V, dtype=mx.complex64)}),
        (f"values are bfloat16 (1, 2, 5, 24), {VALUES}", {"v": z(*V, dtype=mx.bfloat16)}),
    ),
    QUANTIZED: (
        (f"bits is 7, {BITS}", {"bits": 7}),
        (f"v_bits is 16, {BITS}", {"v_bits": 16}),
        ("group_size is 48, expected one of (32, 64, 128).", {"group_size": 48}),
        (f"sparse_v_threshold is 1.0, {DECAY}", {"sparse_v_threshold": 1.0}),
        (f"sparse_v_threshold is -0.5, {DECAY}", {"sparse_v_threshold": -0.5}),
        ("sparse_v_threshold is nan, expected", {"sparse_v_threshold": math.nan}),
        ("key words are uint32 (1, 2, 5, 16), expected uint32 [B, Hkv, N, D * bits / 32] = (1, "
         "Hkv, N, 8)", {"bits": 4}),
        ("keys have 64 elements per row of 8 bits, expected a multiple of group_size = 128 "
         "elements.", {"group_size": 128}),
        (f"key words are float32 (1, 2, 5, 16), {KEY_WORDS}", {"k_w": z(1, 2, 5, 16)}),
        (f"key words are uint32 (5, 16), {KEY_WORDS}", {"k_w": z(5, 16, dtype=UINT)}),
        (f"key words are uint32 (1, 2, 5, 15), {KEY_WORDS}", {"k_w": WORDS[..., :15]}),
        (f"key words are uint32 (1, 2, 0, 16), {KEY_WORDS}",
         k(tuple(part[:, :, :0] for part in pack(*K)))),
        ("key words are uint32 (1, 2, 5, 16), expected uint32 [B, Hkv, N, D * bits / 32] = (2, ",
         {"q": z(2, 4, 2, 64)}),
        ("key words are uint32 (1, 2, 5, 16), expected uint32 [B, Hkv, N, D * bits / 32] = (1, "
         "Hkv, N, 32)", {"q": z(1, 4, 2, 128)}),
        ("key words are uint32 (1, 2, 5, 16), expected", {"q": z(1, 3, 2, 64)}),
        (f"key scales are float32 (1, 2, 4, 1), expected {FLOATS} [B, Hkv, N, D / group_size] = "
         "(1, 2, 5, 1).", {"k_s": SCALES[:, :, :4]}),
        ("key scales are int32", k((WORDS, *[SCALES.astype(INT)] * 2))),
        ("values have 15 words per row of 8 bits, expected a multiple of group_size = 64 "
         "elements.", {"v_w": WORDS[..., :15]}),
        (f"value words are uint32 (1, 2, 6, 16), {VALUE_WORDS}", v(pack(1, 2, 6, 64))),
        (f"value words are uint32 (1, 1, 5, 16), {VALUE_WORDS}", v(pack(1, 1, 5, 64))),
        ("value scales are float32 (1, 2, 6, 1), expected float32 [B, Hkv, N, Dv / group_size] = "
         "(1, 2, 5, 1).", {"v_s": z(1, 2, 6, 1), "v_b": z(1, 2, 6, 1)}),
        ("value scales are float16 (1, 2, 5, 1), expected float32", v(pack(*K, dtype=HALF))),
        ("value biases are float16 (1, 2, 5, 1), expected float32", {"v_b": SCALES.astype(HALF)}),
        ("keys have 64 elements per row and codes of 5 bits, expected a power of two",
         {**k(codes(5)), **v(codes(3)), "bits": 5, "v_bits": 3}),
        ("values have 9 words per row and codes of 3 bits, expected a power of two",
         {**k(codes(3)), **v((z(1, 2, 5, 9, dtype=UINT), z(1, 2, 5, 1))), "bits": 3}),
        ("key norms are float32 (1, 2, 5), expected float32",
         {**k((codes(3)[0], z(1, 2, 5))), **v(codes(3)), "bits": 3}),
        ("keys and values are 2 and 1 arrays, expected both packed",
         {**k(codes(3)), **v((z(*K),)), "bits": 3}),
    ),
    "keep_indices": (
        (f"scores are float32 (1, 5), expected float32 [B, H, N], {FREE}.", {"scores": z(1, 5)}),
        ("scores are float32 (1, 2, 0)",
         {"scores": z(1, 2, 0), "positions": z(1, 2, 0, dtype=INT)}),
        ("scores are float16 (1, 2, 5)", {"scores": z(*ROWS, dtype=HALF)}),
        ("positions are int32 (1, 2, 6), expected int32 [B, H, N] = (1, 2, 5).",
         {"positions": z(1, 2, 6, dtype=INT)}),
        ("positions are int32 (1, 1, 2, 5)", {"positions": z(1, *ROWS, dtype=INT)}),
        ("positions are int64 (1, 2, 5)", {"positions": z(*ROWS, dtype=mx.int64)}),
        ("keep is 0, expected at least 1 and at most N = 5.", {"keep": 0}),
        ("keep is -3, expected at least 1 and at most N = 5.", {"keep": -3}),
        ("keep is 6, expected at least 1 and at most N = 5.", {"keep": 6}),
        ("sink_size is -1, expected at least 0.", {"sink_size": -1}),
    ),
    "accumulate_scores": (
        ("scores are float32 (4, 1, 5), expected float32 [B, Hq, Lq, N]", {"scores": z(4, 1, 5)}),
        ("scores are float16 (1, 4, 1, 5)", {"scores": z(1, 4, 1, 5, dtype=HALF)}),
        ("scores are float32 (1, 4, 0, 5)", {"scores": z(1, 4, 0, 5)}),
        ("scores are float32 (1, 4, 1, 6)", {"scores": z(1, 4, 1, 6)}),
        ("scores are float32 (1, 3, 1, 5)", {"scores": z(1, 3, 1, 5)}),
        (f"scores are float32 (1, 4, 129, 5), expected float32 [B, Hq, Lq, N] = (1, Hq, Lq, 5), "
         f"{FREE}, Hq a multiple of H = 2, Lq at most 128.", {"scores": z(1, 4, 129, 5)}),
        ("importance is float16 (1, 2, 5)", {"importance": z(*ROWS, dtype=HALF)}),
        ("importance is float32 (2, 5), expected", {"importance": z(2, 5)}),
        (f"decay is 1.0, {DECAY}", {"decay": 1.0}),
        (f"decay is nan, {FINITE}", {"decay": math.nan}),
    ),
    "key_diversity": (
        ("keys are float32 (2, 5, 64), expected float32", {"keys": z(2, 5, 64)}),
        ("keys are float32 (1, 2, 0, 64), expected float32", {"keys": z(1, 2, 0, 64)}),
        ("keys are int32 (1, 2, 5, 64), expected float32", {"keys": z(*K, dtype=INT)}),
    ),
    "attention_and_accumulate": (
        ("queries are float32 (1, 4, 129, 64), expected", {"q": z(1, 4, 129, 64)}),
        (f"importance is float32 (1, 3, 5), {OF_ROWS}", {"importance": z(1, 3, 5)}),
        ("sparse_v_threshold is 0.5, expected 0 with dense rows", {"sparse_v_threshold": 0.5}),
        (f"decay is 1.0, {DECAY}", {"decay": 1.0}),
    ),
    "quantize_append": (
        ("bits is 1, expected one of", {"bits": 1}),
        ("v_bits is 7, expected one of", {"v_bits": 7}),
        ("group_size is 48, expected one of", {"group_size": 48}),
        ("new keys are int32 (1, 2, 3, 64)", {"new_keys": z(1, 2, 3, 64, dtype=INT)}),
        ("new keys are float32 (2, 3, 64), expected", {"new_keys": z(2, 3, 64)}),
        (f"new values are float32 (1, 2, 4, 64), expected {FLOATS} [B, H, L, Dv] = (1, 2, 3, Dv), "
         f"{FREE}.", {"new_values": z(1, 2, 4, 64)}),
        ("values have 48 elements per row of 8 bits, expected a multiple of group_size = 64 "
         "elements.", {"new_values": z(1, 2, 3, 48)}),
        ("key words are uint32 (1, 2, 5, 8), expected uint32 [B, H, N, D * bits / 32] = (1, 2, N, "
         f"16), {FREE}.", {"quantised_keys": pack(*K, bits=4)}),
        ("key scales are float32 (1, 2, 5, 1), expected float16 [B, H, N, D / group_size] = (1, 2, "
         "5, 1).", {"new_keys": z(1, 2, 3, 64, dtype=HALF)}),
        ("value scales are float16", {"quantised_values": pack(*K, dtype=HALF)}),
        ("value words are uint32 (1, 2, 4, 16), expected uint32 [B, H, N, Dv * v_bits / 32] = (1, "
         "2, 5, 16)", {"quantised_values": pack(1, 2, 4, 64)}),
        ("slots are int32 (1, 2, 3), expected uint32 [B, H, L] = (1, 2, 3).",
         {"slots": z(1, 2, 3, dtype=INT)}),
        ("slots are uint32 (1, 2, 2), expected", {"slots": z(1, 2, 2, dtype=UINT)}),
        ("keys have 64 elements per row and codes of 5 bits, expected a power of two",
         {"quantised_keys": codes(5), "bits": 5}),
        ("keys have 48 elements per row and codes of 3 bits, expected a power of two of elements "
         "from 32 to 1024, and 2, 3 or 4 bits.",
         {"quantised_keys": codes(3), "new_keys": z(1, 2, 3, 48), "bits": 3}),
        ("value words are uint32 (1, 2, 5, 6), expected uint32 [B, H, N, Dv * v_bits / 32] = ",
         {"quantised_values": codes(3), "v_bits": 4}),
        ("key norms are float16 (1, 2, 5, 1), expected float32 [B, H, N, 1] = (1, 2, 5, 1).",
         {"quantised_keys": (codes(3)[0], z(1, 2, 5, 1, dtype=HALF)), "bits": 3}),
        ("keys are float16 (1, 2, 5, 64), expected float32",
         {"quantised_keys": (z(*K, dtype=HALF),)}),
    ),
    "prefill_scores": (
        ("keys are float32 (1, 2, 0, 64), expected float32", {"k": z(1, 2, 0, 64)}),
        (f"keys are float16 (1, 2, 5, 64), {KEYS}", {"k": z(*K, dtype=HALF)}),
        (f"keys are float32 (1, 2, 5, 64), {KEYS[:-2]}3.", {"q": z(1, 3, 2, 64)}),
        ("kind is 'max', expected one of ('ema', 'mass').", {"kind": "max"}),
        (f"decay is 1.0, {DECAY}", {"decay": 1.0}),
        (f"decay is -0.5, {DECAY}", {"decay": -0.5}),
        ("queries is 0, expected at least 1.", {"queries": 0}),
        ("importance is given with kind 'mass', expected it with 'ema'.",
         {"kind": "mass", "importance": z(*ROWS)}),
        (f"importance is float32 (1, 2, 6), {OF_ROWS}", {"importance": z(1, 2, 6)}),
        (f"importance is float16 (1, 2, 5), {OF_ROWS}", {"importance": z(*ROWS, dtype=HALF)}),
    ),
}  # fmt: skip

_TYPES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    ATTENTION: (
        ("mask is 'Causal', expected 'causal', an array or None.", {"mask": "Causal"}),
        ("scale is inf, expected", {"scale": 10**400}),
        *((f"{name} must be an mlx.core.array, found {type(other).__name__}.", {place: other})
          for place, name in (("q", "queries"), ("k", "keys"), ("v", "values"))
          for other in (np.zeros(Q, np.float32), [[1.0]], 1.0, None, "q")),
        *(("mask must be an mlx.core.array", {"mask": m}) for m in (True, 0, [True], np.ones(5))),
        ("sinks must be an mlx.core.array, found list", {"sinks": [0.0] * 4}),
        ("row_bias must be an mlx.core.array, found ndarray", {"row_bias": np.zeros(ROWS)}),
        *(("scale must be a number, found", {"scale": s})
          for s in (None, "1", True, 1j, mx.array(1.0), np.ones(1))),
        *(("stream must be None, an mlx.core.Stream", {"stream": s}) for s in ("cpu", 0, True)),
    ),
    QUANTIZED: (
        ("key scales must be an mlx.core.array, found list.", {"k_s": [1.0]}),
        ("bits must be an integer, found float.", {"bits": 8.0}),
        ("v_bits must be an integer, found str.", {"v_bits": "4"}),
        ("group_size must be an integer, found bool.", {"group_size": True}),
        ("sparse_v_threshold must be a number, found NoneType.", {"sparse_v_threshold": None}),
    ),
    "keep_indices": (
        (f"keep is {10**30}, expected at least 1", {"keep": 10**30}),
        ("scores must be an mlx.core.array, found ndarray", {"scores": np.zeros(ROWS)}),
        *(("keep must be an integer, found", {"keep": n}) for n in (1.0, None, True, "1")),
        ("sink_size must be an integer, found float", {"sink_size": 4.0}),
        ("recent_start is float32 (), expected an integer, or int32 () or [B] = (1,).",
         {"recent_start": z()}),
        ("recent_start must be an integer, found str", {"recent_start": "3"}),
        ("stream must be None", {"stream": "gpu"}),
    ),
    "attention_and_accumulate": (("keys and values are arr", {"v": pack(*K)}),),
    "quantize_append": (
        ("quantised keys must be a tuple of words, scales and biases", {"quantised_keys": WORDS}),
        ("keys must be words, scales and biases, words and norms, or the rows alone, found 4",
         {"quantised_keys": (*pack(*K), WORDS)}),
        ("bits must be an integer, found float", {"bits": 8.0}),
    ),
    "prefill_scores": tuple(
        (f"{said} must be an mlx.core.array", {name: [1.0]})
        for name, said in (("q", "queries"), ("k", "keys"), ("importance", "importance"),
                           ("sinks", "sinks"))
    ),
}  # fmt: skip


def wrong_calls(types: bool = False) -> list[tuple[str, str, dict[str, Any]]]:
    """Operation, what its error begins with, and the arguments; ``types``: those of types that only
    Python can be given, as well."""
    found = []
    for op, calls in _WRONG.items():
        shared = _SHARED if "scale" in RIGHT[op] else ()
        others = _TYPES.get(op, ()) if types else ()
        found += [(op, text, RIGHT[op] | changes) for text, changes in (*shared, *calls, *others)]
    return found
