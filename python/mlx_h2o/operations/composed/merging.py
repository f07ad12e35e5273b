"""Operations on rows in several arrays: the definitions, in plain MLX operations."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from mlx_h2o.operations import composed
from mlx_h2o.operations.composed.buffers import gathered
from mlx_h2o.operations.requests import Parts

_WORD = 32


def merge_segments(outs: Sequence[mx.array], lses: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
    """The outputs averaged by their shares ``exp(lse_i - lse)`` of the common denominator, and
    ``lse``, its logarithm. A query that sees nothing gives zeros.
    """
    each = mx.stack([*lses], axis=-1)
    whole = mx.logsumexp(each, axis=-1)
    shares = mx.where(mx.expand_dims(whole, -1) == -mx.inf, 0.0, mx.softmax(each, axis=-1))
    # float32 by promotion.
    mixed = sum(out * shares[..., at : at + 1] for at, out in enumerate(outs))
    return cast(mx.array, mixed).astype(outs[0].dtype), whole


def segment_rows(
    tiers: Sequence[mx.array],
    newest: mx.array,
    bits: Sequence[int],
    group_size: int,
    slots: mx.array | None = None,
    to: int = 0,
) -> list[mx.array]:
    """The rows of all tiers, then the newest, in one format; only those at ``slots``, if given.

    Without ``to`` the result is one array: packed rows are dequantised in float32 and rounded. With
    ``to`` all rows are packed with that many bits: packed rows are ``recoded``.
    """
    parts: list[Sequence[mx.array]] = []
    for at, width in enumerate(bits):
        packed = tuple(tiers[3 * at : 3 * at + 3])
        if packed[0].shape[2] == 0:  # MLX refuses empty arrays
            continue
        if to:
            parts.append(recoded(packed, width, to))
        else:
            parts.append([composed.dense(packed, width, group_size).astype(newest.dtype)])
    if not to:
        parts.append([newest])
    elif newest.shape[2]:
        parts.append(mx.quantize(newest, group_size=group_size, bits=to))
    joined = [mx.concatenate([*same], axis=2) for same in zip(*parts, strict=True)]
    return joined if slots is None else [gathered(part, slots) for part in joined]


def recoded(rows: Parts, bits: int, to: int) -> Parts:
    """Rows of ``bits`` as rows of ``to`` bits, both 2, 4 or 8, without dequantising them.

    Fewer bits keep the upper bits of each code, which then stands for the middle of the levels that
    it merges: that adds an error of at most half a step of the new scale. More bits keep codes,
    scales and biases as they are: the same numbers in more space. Going back restores such groups,
    recognised by codes that fit into fewer bits: quantisation itself always uses the whole range of
    codes.
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
