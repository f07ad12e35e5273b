"""Packed rows at fewer or more bits, without their numbers being read: a row is quantised once."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from mlx_h2o.operations.requests import Parts

_WORD = 32


def recoded(rows: Parts, bits: int, to: int) -> Parts:
    """Rows of ``bits`` as rows of ``to``, both 2, 4 or 8, without their numbers being read.

    Fewer bits keep the upper ones of each code: the level in the middle of those that fall
    together, so that the error is at most half a step of the new scale, beside that of before.
    More bits keep codes, scales and biases as they are: the same numbers in more space. Groups
    whose codes would fit into fewer bits, as those do, come back as they were: quantisation itself
    always uses the range of its codes.
    """
    words, scales, biases = rows
    if bits == to:
        return rows
    codes = _codes(words, bits)
    if to > bits:
        return _words(codes, to), scales, biases
    lost = bits - to
    step = scales.astype(mx.float32)
    middle = biases.astype(mx.float32) + step * ((2**lost - 1) / 2)
    grouped = codes.reshape(*scales.shape, -1)
    fit = cast(mx.array, mx.max(grouped, axis=-1) < 2**to)
    grouped = mx.where(mx.expand_dims(fit, -1), grouped, grouped >> mx.array(lost, mx.uint32))
    return (
        _words(grouped.reshape(codes.shape), to),
        mx.where(fit, scales, (step * 2**lost).astype(scales.dtype)),
        mx.where(fit, biases, middle.astype(biases.dtype)),
    )


def _shifts(bits: int) -> mx.array:
    return mx.arange(0, _WORD, bits, dtype=mx.uint32)


def _codes(words: mx.array, bits: int) -> mx.array:
    codes = mx.expand_dims(words, -1) >> _shifts(bits)
    codes = codes & mx.array(2**bits - 1, mx.uint32)
    return codes.reshape(*words.shape[:-1], words.shape[-1] * (_WORD // bits))


def _words(codes: mx.array, bits: int) -> mx.array:
    per_word = _WORD // bits
    parts = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_word, per_word)
    return mx.sum(parts << _shifts(bits), axis=-1).astype(mx.uint32)
