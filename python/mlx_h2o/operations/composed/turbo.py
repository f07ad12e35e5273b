"""Rows as a norm and the codes of a rotated direction (TurboQuant, as mlx-swift-lm stores them).

The format, of a row x of d elements, d a power of two:

- The direction ``y = H diag(s) x / (|x| sqrt(d))``, where H is the Walsh-Hadamard matrix of
  Sylvester's construction. The signs s are +1 where ``mx.random.uniform(shape=[d], key)`` is above
  one half, else -1; the key is 42 for keys and 43 for values.
- The code of an element of y is how many of the midpoints between ``levels`` it exceeds. Levels are
  optimal for the density ``(1 - y^2)^((d-3)/2)`` of one element of a random direction.
- ``norm``: float32, |x| over the length of the levels of its codes, so that a decoded row is as
  long as x. With |x| itself it would be too short, because levels are means.
- Code i of b bits is in the bits ``[i b, (i + 1) b)`` of the words, uint32, from the lowest bit of
  the first word on: ``d b / 32`` words and 4 bytes of norm for each row.

A rotation preserves dot products and sums, so attention never rotates rows back: it rotates the
queries into the basis of the keys' codes, and the output back from the basis of the values' codes,
once each. Plain MLX operations; all arithmetic is float32.
"""

import itertools
import math
from bisect import bisect_left
from dataclasses import replace
from functools import cache

import mlx.core as mx

from mlx_h2o.operations.requests import AttentionRequest, are_codes

KEYS, VALUES = 42, 43
"""Seeds of the signs."""

_LEAST_NORM = 1e-8
_STEPS = 100


@cache
def levels(size: int, bits: int) -> tuple[float, ...]:
    """The ``2 ** bits`` levels of rows of ``size`` elements, ascending.

    100 steps of Lloyd's algorithm (Lloyd 1957, Max 1960), from the middles of equal shares of the
    density. With y = sin(t) the integrals have closed forms.
    """
    power, half = size - 2, 2 ** (bits - 1)
    found = [math.sin(_angle((i + 0.5) / half, power)) for i in range(half)]
    for _ in range(_STEPS):
        inner = [math.asin((a + b) / 2) for a, b in itertools.pairwise(found)]
        edges = [0.0, *inner, math.pi / 2]
        masses = [_mass(edge, power) for edge in edges]
        moments = [-(math.cos(edge) ** (power + 1)) / (power + 1) for edge in edges]
        found = [(moments[i + 1] - moments[i]) / (masses[i + 1] - masses[i]) for i in range(half)]
    return (*(-level for level in reversed(found)), *found)


def _angle(share: float, power: int) -> float:
    """The angle below which this share of the mass from 0 to pi / 2 lies."""
    wanted, unit = share * _mass(math.pi / 2, power), math.pi / 2**53
    return unit * bisect_left(range(2**52), wanted, key=lambda place: _mass(place * unit, power))


def _mass(angle: float, power: int) -> float:
    """The integral of ``cos(t) ** power`` from 0 to ``angle``, for an even power."""
    cosine, sine = math.cos(angle), math.sin(angle)
    total, factor = angle, cosine
    for k in range(2, power + 1, 2):
        total = (factor * sine + (k - 1) * total) / k
        factor *= cosine * cosine
    return total


@cache
def codebook(size: int, bits: int) -> mx.array:
    """The levels, float32 [2 ** bits]."""
    return mx.array(levels(size, bits), mx.float32)


@cache
def signs(size: int, seed: int) -> mx.array:
    """+1 and -1, float32 [size]."""
    above = mx.random.uniform(shape=[size], key=mx.random.key(seed)) > 0.5
    return mx.array(mx.where(above, 1.0, -1.0).tolist(), mx.float32)


def rotated(rows: mx.array, seed: int) -> mx.array:
    """Rows [..., d] in the basis of the codes, float32."""
    found = rows.astype(mx.float32) * signs(rows.shape[-1], seed)
    return mx.hadamard_transform(found) if rows.size else found  # MLX refuses empty arrays


def restored(rows: mx.array, seed: int) -> mx.array:
    """The inverse of ``rotated``."""
    return mx.hadamard_transform(rows) * signs(rows.shape[-1], seed) if rows.size else rows


def encode_rows(rows: mx.array, bits: int, seed: int) -> tuple[mx.array, mx.array]:
    """Rows [..., d] as words, uint32 [..., d * bits / 32], and norms, float32 [..., 1]: the
    definition, in plain MLX operations."""
    rows = rows.astype(mx.float32)
    lengths = _lengths(rows)
    found = rotated(rows / mx.maximum(lengths, _LEAST_NORM), seed)
    ascending = levels(rows.shape[-1], bits)
    codes = mx.zeros(found.shape, mx.uint32)
    for low, high in itertools.pairwise(ascending):
        codes = codes + (found > (low + high) / 2)
    norms = lengths / _lengths(codebook(rows.shape[-1], bits)[codes])
    places = mx.arange(bits, dtype=mx.uint32)
    stream = (mx.expand_dims(codes, -1) >> places) & mx.array(1, mx.uint32)
    stream = stream.reshape(*codes.shape[:-1], codes.shape[-1] * bits // 32, 32)
    return mx.sum(stream << mx.arange(32, dtype=mx.uint32), axis=-1).astype(mx.uint32), norms


def _lengths(rows: mx.array) -> mx.array:
    """[..., 1]; summed in parts, since a long float32 sum of few different numbers drifts."""
    parts = mx.sum(mx.square(rows).reshape(*rows.shape[:-1], rows.shape[-1] // 32, 32), axis=-1)
    return mx.sqrt(mx.sum(parts, axis=-1, keepdims=True))


def decode_rows(
    words: mx.array, norms: mx.array, bits: int, seed: int, dtype: mx.Dtype
) -> mx.array:
    """The rows [B, H, N, D] that words and norms stand for: the definition."""
    return restored(rotated_rows(words, norms, bits), seed).astype(dtype)


def rotated_rows(words: mx.array, norms: mx.array, bits: int) -> mx.array:
    """The rows as float32 [B, Hkv, N, D], in the basis of the codes."""
    *before, size = words.shape
    size = size * 32 // bits
    if words.size == 0:  # MLX refuses empty arrays
        return mx.zeros((*before, size))
    # The words have the layout of mx.quantize.
    scales = mx.ones((*before, size // 32))
    codes = mx.dequantize(words, scales, mx.zeros_like(scales), group_size=32, bits=bits)
    return codebook(size, bits)[codes.astype(mx.uint32)] * norms


def turned(request: AttentionRequest) -> AttentionRequest:
    """The request with its queries, float32, in the basis of the keys."""
    queries = request.queries.astype(mx.float32)
    if are_codes(request.keys):
        queries = rotated(queries, KEYS)
    return replace(request, queries=queries)


def output(request: AttentionRequest, out: mx.array) -> mx.array:
    """The output of the turned request, rotated back and in the dtype of the queries."""
    if are_codes(request.values):
        out = restored(out, VALUES)
    return out.astype(request.queries.dtype)
