"""Attention over quantised keys and values, with its scores; re-exported by ``fast``."""

import mlx.core as mx

from mlx_h2o.operations.backends import attended
from mlx_h2o.operations.validate import StreamLike, attention_request
from mlx_h2o.operations.validate_quantized import QUANTIZED_ATTENTION


def scaled_dot_product_attention_quantized_with_scores(
    q: mx.array,
    k_w: mx.array,
    k_s: mx.array | None,
    k_b: mx.array | None,
    v_w: mx.array,
    v_s: mx.array,
    v_b: mx.array | None,
    *,
    scale: float,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    row_bias: mx.array | None = None,
    sparse_v_threshold: float = 0.0,
    return_lse: bool = False,
    return_skipped: bool = False,
    stream: StreamLike = None,
) -> tuple[mx.array, ...]:
    """``scaled_dot_product_attention_with_scores`` of keys and values that ``mx.quantize`` packed.

    The kernels dequantise in registers (AtomGradient 2026, section 3.5) and write nothing dense to
    memory. Slices of a larger buffer are taken as they are. The composition, and GPU calls with
    more than 8 queries, dequantise to float32 first.

    Keys or values may also be codes of rotated rows (``kv_format="turbo3"``; docs/design.md): then
    words, norms, float32 [B, Hkv, N, 1], and None stand in the places of words, scales and biases,
    D is a power of two from 32 to 1,024, and the codes have 2, 3 or 4 bits. Keys beside such values
    may be one array in the dtype of the queries, with None for scales and biases.

    Args:
        q: queries [B, Hq, Lq, D], float32, float16 or bfloat16.
        k_w: packed keys, uint32 [B, Hkv, N, D * bits / 32]; Hq is a multiple of Hkv.
        k_s: scales of the keys, [B, Hkv, N, D / group_size], of any of the three float dtypes.
        k_b: biases of the keys, shape and dtype of the scales.
        v_w: packed values, uint32 [B, Hkv, N, Dv * v_bits / 32].
        v_s: scales of the values, [B, Hkv, N, Dv / group_size], the dtype of the keys' scales.
        v_b: biases of the values, shape and dtype of their scales.
        scale: finite factor of the products, usually 1 / sqrt(D).
        bits: bits per element of the keys, and of the values unless ``v_bits`` is given: 2, 3, 4,
            5, 6 or 8.
        group_size: elements that share a scale and a bias: 32, 64 or 128.
        v_bits: bits per element of the values.
        mask: None, ``"causal"``, or an array, as in the dense operation.
        sinks: learned logits [Hq], as in the dense operation.
        row_bias: float32 [B, Hkv, N], as in the dense operation.
        sparse_v_threshold: a pair whose weight is below it adds nothing to ``out``, and its value
            row is not read where a kernel serves the call (Turney 2026); scores and lse do not
            change. 0 turns it off; 1e-6 is a good value. ``out`` changes by at most the skipped
            weight times max|V|.
        return_lse: return the log of the denominator too.
        return_skipped: return too what share of the rows each query skipped.
        stream: stream or device to run on.

    Returns:
        ``(out, scores)``, and then ``lse`` and ``skipped`` where asked for. The first three are as
        the dense operation gives them for the dequantised rows: ``out`` [B, Hq, Lq, Dv] in the
        dtype of the queries, ``scores`` float32 [B, Hq, Lq, N], ``lse`` float32 [B, Hq, Lq].
        ``skipped`` is float32 [B, Hq, Lq]: the share of the N rows that added nothing to ``out``
        because their weight was below the threshold; masked pairs are not among them.

    Raises:
        ValueError: sizes that do not fit together or to ``bits`` and ``group_size``, empty arrays,
            dtypes, bits or group sizes that are not served, a threshold that is not 0 or more and
            below 1, a mask, sinks or row_bias of the wrong shape or dtype, a scale that is not
            finite, or a named back end that cannot serve the call.
        TypeError: an argument that is not an array, a number or a stream where one is expected.
    """
    request = attention_request(
        q,
        (k_w, k_s, k_b),
        (v_w, v_s, v_b),
        scale=scale,
        packed=True,
        bits=bits,
        group_size=group_size,
        v_bits=v_bits,
        mask=mask,
        sinks=sinks,
        row_bias=row_bias,
        sparse_v_threshold=sparse_v_threshold,
        return_lse=return_lse,
        return_skipped=return_skipped,
        stream=stream,
        op=QUANTIZED_ATTENTION,
    )
    return attended(request, QUANTIZED_ATTENTION)
