"""Rows that take the places of others, which are handed back.

One operation, because MLX copies a whole buffer that is written while an operation that reads it is
still under way. The definition is of plain MLX operations; a back end may bring
``exchange_rows(request)``.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_h2o.operations.backends import operation_of
from mlx_h2o.operations.buffers import gathered, written

__all__ = ["RowExchange", "exchange_rows"]


class RowExchange(NamedTuple):
    """One call: ``rows`` for each of the ``buffers``, or None for those at ``start`` and up."""

    buffers: list[mx.array]
    slots: mx.array
    rows: list[mx.array] | None = None
    start: int = 0


def exchange_rows(request: RowExchange) -> tuple[list[mx.array], list[mx.array]]:
    """The buffers [B, H, N, width] with rows at ``slots``, and the rows that were there.

    Slots are uint32 [B, H, n], distinct within a head. Rows [B, H, n, width] that come from the
    buffers themselves stay where they are too. Where nothing else holds a buffer, the native back
    end writes in its memory.
    """
    served = operation_of("exchange_rows", None)
    if served is not None:
        results: list[mx.array] = served(request)
        count = len(request.buffers)
        return results[:count], results[count:]
    buffers, slots, rows, start = request
    old = [gathered(buffer, slots) for buffer in buffers]
    if rows is None:
        source = mx.arange(start, start + slots.shape[2], dtype=mx.uint32)
        source = mx.broadcast_to(source, slots.shape)
        rows = [gathered(buffer, source) for buffer in buffers]
    rows = mx.depends(list(rows), old)  # read before it is written over
    return [written(*pair) for pair in zip(buffers, [slots] * len(rows), rows, strict=True)], old
