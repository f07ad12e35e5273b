"""The definitions of what serves rows that lie in several arrays, in plain MLX operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from mlx_h2o.operations import composed
from mlx_h2o.operations.arguments import StreamLike, placed
from mlx_h2o.operations.composed.buffers import gathered
from mlx_h2o.operations.composed.recoding import recoded
from mlx_h2o.operations.requests import PackedRows


def merge_segments(
    outs: Sequence[mx.array], lses: Sequence[mx.array], stream: StreamLike = None
) -> tuple[mx.array, mx.array]:
    """The outputs averaged by their shares ``exp(lse_i - lse)`` of the common denominator, and the
    log of that. A query that sees nothing gives zeros.
    """
    with placed(stream):
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
    stream: StreamLike = None,
) -> list[mx.array]:
    """The rows of all tiers, then the newest, in one form; only those at ``slots``, if given.

    As one array packed rows are dequantised in float32 and rounded. Packed with ``to`` bits, those
    that were packed before are ``recoded``.
    """
    with placed(stream):
        parts: list[Sequence[mx.array]] = []
        for at, width in enumerate(bits):
            packed = tuple(tiers[3 * at : 3 * at + 3])
            if packed[0].shape[2] == 0:  # MLX refuses none
                continue
            if to:
                parts.append(recoded(packed, width, to))
            else:
                rows = composed.dense(PackedRows(packed, width, group_size))
                parts.append([rows.astype(newest.dtype)])
        if not to:
            parts.append([newest])
        elif newest.shape[2]:
            parts.append(mx.quantize(newest, group_size=group_size, bits=to))
        joined = [
            mx.concatenate(list(same), axis=2) if len(same) > 1 else same[0]
            for same in zip(*parts, strict=True)
        ]
        return joined if slots is None else [gathered(part, slots) for part in joined]
