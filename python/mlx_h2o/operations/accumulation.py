"""The moving average of scores: of scores that are there, and in one operation with attention.

Re-exported by ``fast``. Each call is validated, then served by the best back end (``backends``).
"""

import mlx.core as mx

from mlx_h2o.operations import cache_requests
from mlx_h2o.operations.arguments import StreamLike
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.requests import Packed

__all__ = ["accumulate_scores", "attention_and_accumulate"]


def accumulate_scores(
    importance: mx.array,
    scores: mx.array,
    *,
    decay: float,
    masked: bool = True,
    stream: StreamLike = None,
) -> mx.array:
    """The moving average ``C = a*C + (1-a)*|s|`` of every row, over the queries in order.

    ``s`` is the mean of a row's scores over the unmasked query heads of its KV head. A pair that
    is masked for every head of the group leaves C unchanged, and the first unmasked score of a
    row sets ``C = |s|`` (AtomGradient 2026, sec. 3.2, whose C starts at 0).

    Args:
        importance: C, float32 [B, H, N], NaN where a row has not been scored.
        scores: float32 [B, Hq, Lq, N], -inf (or NaN) where masked; Hq a multiple of H, Lq at
            most 128.
        decay: a, at least 0 and below 1.
        masked: False promises that every score is finite, which saves work on some back ends.
        stream: stream or device to run on.

    Returns:
        float32 [B, H, N]. With one query the arithmetic, and so every bit, is the same on all
        CPU back ends.

    Raises:
        ValueError: shapes, dtypes or a decay other than these.
        TypeError: an argument that is not an array or a number where one is expected.
    """
    request = cache_requests.accumulate_request(
        importance, scores, decay=decay, masked=masked, stream=stream
    )
    op = "accumulate_scores"
    result: mx.array = resolve(request.stream, op=op).function(op)(request)
    return result


def attention_and_accumulate(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    importance: mx.array,
    *,
    scale: float,
    decay: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    sparse_v_threshold: float = 0.0,
    stream: StreamLike = None,
) -> tuple[mx.array, mx.array]:
    """Attention whose scores go into a moving average; a back end need not store them.

    ``scaled_dot_product_attention_with_scores`` followed by ``accumulate_scores``, with the
    arguments and errors of both; at most 128 queries. ``importance`` has the heads of the keys.
    ``k`` and ``v`` may be packed, each a tuple of words, scales and biases: then it is the
    quantised operation, and ``bits``, ``group_size``, ``v_bits`` and ``sparse_v_threshold`` are
    its arguments.

    Returns:
        ``(out, importance)``: [B, Hq, Lq, Dv] in the dtype of the queries, and float32
        [B, Hkv, N]. Evaluating ``out`` evaluates both.
    """
    request = cache_requests.attention_accumulate_request(
        q, k, v, importance, scale=scale, decay=decay, mask=mask, sinks=sinks, bits=bits,
        group_size=group_size, v_bits=v_bits, sparse_v_threshold=sparse_v_threshold,
        stream=stream,
    )  # fmt: skip
    operations = resolve(request.attention.stream, op="attention_and_accumulate")
    return operations.serve_accumulating(request)
