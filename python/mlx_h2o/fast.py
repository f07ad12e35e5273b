"""Operations: attention that returns its scores, and the selection of rows to keep.

Each call is validated, then served by the best back end on this machine (see ``backends``).
"""

import mlx.core as mx

from mlx_h2o.operations import composed, validate
from mlx_h2o.operations.accumulation import accumulate_scores, attention_and_accumulate
from mlx_h2o.operations.backends import attended, serve
from mlx_h2o.operations.diversity import key_diversity
from mlx_h2o.operations.prefill import prefill_scores
from mlx_h2o.operations.quantize_append import quantize_append
from mlx_h2o.operations.quantized import scaled_dot_product_attention_quantized_with_scores
from mlx_h2o.operations.requests import PerSequence
from mlx_h2o.operations.validate import StreamLike

__all__ = [
    "accumulate_scores",
    "attention_and_accumulate",
    "keep_indices",
    "key_diversity",
    "prefill_scores",
    "quantize_append",
    "scaled_dot_product_attention_quantized_with_scores",
    "scaled_dot_product_attention_with_scores",
]


def scaled_dot_product_attention_with_scores(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    row_bias: mx.array | None = None,
    return_lse: bool = False,
    stream: StreamLike = None,
) -> tuple[mx.array, ...]:
    """Scaled dot product attention and the logits that went into its softmax.

    As in AtomGradient 2026, section 3.1: the scores are a by-product of the attention kernel.

    Args:
        q: queries [B, Hq, Lq, D], float32, float16 or bfloat16.
        k: keys [B, Hkv, N, D], the dtype of the queries; Hq is a multiple of Hkv.
        v: values [B, Hkv, N, Dv], the dtype of the queries; Dv may differ from D.
        scale: finite factor of the products, usually 1 / sqrt(D).
        mask: None; ``"causal"`` (bottom-right aligned: query i sees the keys n <= N - Lq + i);
            a bool array, true where a query sees a key; or a float array that is added to the
            scaled products, where a value at or below ``finfo(mask.dtype).min / 2`` masks the
            pair. Arrays broadcast to [B, Hq, Lq, N].
        sinks: learned logits [Hq], float: they join the denominator and have no row. A sink of
            -inf has no weight.
        row_bias: float32 [B, Hkv, N], added to the products of every query of the KV head: a row
            of bias ``log(n)`` counts as n rows. -inf masks the row.
        return_lse: return the log of the denominator too.
        stream: stream or device to run on.

    Returns:
        ``(out, scores)``, or ``(out, scores, lse)``. ``out`` [B, Hq, Lq, Dv] has the dtype of
        the queries. ``scores``, float32 [B, Hq, Lq, N], are ``scale * q.k + mask + row_bias``,
        -inf where masked. ``lse``, float32 [B, Hq, Lq], includes the sink: the weights are
        ``exp(scores - lse)``; it is -inf where nothing is unmasked and there is no sink, and
        the weights there are 0. A fully masked query gives zeros. NaN in an additive mask or in
        ``row_bias`` makes the output of each query that it meets NaN, and of no other.

    Raises:
        ValueError: wrong number of dimensions, empty or unequal sizes, head counts that do not
            divide, dtypes that differ or are not served, a mask, sinks or row_bias of the wrong
            shape or dtype, a scale that is not finite, or a named back end that cannot serve the
            call.
        TypeError: an argument that is not an array, a number or a stream where one is expected.
    """
    request = validate.attention_request(
        q, k, v, scale=scale, mask=mask, sinks=sinks, row_bias=row_bias, return_lse=return_lse,
        stream=stream,
    )  # fmt: skip
    return attended(request, validate.ATTENTION)


def keep_indices(
    scores: mx.array,
    positions: mx.array,
    *,
    keep: int,
    sink_size: int = 0,
    recent_start: PerSequence | None = None,
    stream: StreamLike = None,
) -> mx.array:
    """Slots of the rows that stay when a cache is cut down to ``keep`` rows per head.

    Best first: protected rows (``0 <= position < sink_size``, or ``position >= recent_start``);
    then scores, descending (infinities allowed); then rows whose score is NaN; then padding.
    Among equals, and among protected rows, the lower position stays; of padding the lower slot.

    Args:
        scores: float32 [B, H, N], one per row.
        positions: int32 [B, H, N], distinct within a head and below 2**30; negative: padding.
        keep: rows to keep, 1 to N.
        sink_size: the first positions, which are protected.
        recent_start: the first position of the protected recent window, or int32 [B]: one for
            each sequence; None: no window.
        stream: stream or device to run on.

    Returns:
        uint32 [B, H, keep], ascending.

    Raises:
        ValueError: shapes, dtypes or counts other than these.
        TypeError: an argument that is not an array or an integer where one is expected.
    """
    request = validate.retention_request(scores, positions, keep, sink_size, recent_start, stream)
    return serve(composed.keep_indices, request)
