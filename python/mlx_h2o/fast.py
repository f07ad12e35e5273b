"""Operations: attention that returns its scores, and the selection of rows to keep.

Each call is checked against the table of operations (metal/operations.toml), then served by the
best back end of this machine (see ``backends``).
"""

from typing import Any, Literal, cast

import mlx.core as mx

from mlx_h2o.operations.arguments import StreamLike, checked_arguments, placed
from mlx_h2o.operations.backends import resolve
from mlx_h2o.operations.composed import accumulating
from mlx_h2o.operations.requests import Parts, PerSequence, attention_request, last_queries

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
    """Scaled dot product attention that also returns the logits of its softmax.

    The scores are a by-product of the attention kernel (AtomGradient 2026, section 3.1).

    Args:
        q: queries [B, Hq, Lq, D], float32, float16 or bfloat16.
        k: keys [B, Hkv, N, D], same dtype as the queries; Hq is a multiple of Hkv.
        v: values [B, Hkv, N, Dv], same dtype as the queries; Dv may differ from D.
        scale: finite factor for the products, usually 1 / sqrt(D).
        mask: None; ``"causal"`` (bottom-right aligned: query i sees the keys n <= N - Lq + i);
            a bool array, true where a query sees a key; or a float array that is added to the
            scaled products, where a value at or below ``finfo(mask.dtype).min / 2`` masks the
            pair. Arrays broadcast to [B, Hq, Lq, N].
        sinks: learned logits [Hq], float, added to the softmax's denominator without a row of
            their own. A sink of -inf has no weight.
        row_bias: float32 [B, Hkv, N], added to the products of every query of the KV head: a row
            of bias ``log(n)`` counts as n rows. -inf masks the row.
        return_lse: also return the log of the denominator.
        stream: stream or device to run on.

    Returns:
        ``(out, scores)``, or ``(out, scores, lse)``. ``out`` [B, Hq, Lq, Dv] has the dtype of
        the queries. ``scores``, float32 [B, Hq, Lq, N], are ``scale * q.k + mask + row_bias``,
        -inf where masked. ``lse``, float32 [B, Hq, Lq], includes the sink: the weights are
        ``exp(scores - lse)``. For a fully masked query ``out`` and the weights are 0, and ``lse``
        is -inf without a sink. NaN in an additive mask or in ``row_bias`` makes the output of
        the queries that it applies to NaN, and of no other.

    Raises:
        ValueError: mismatched shapes, different or unsupported dtypes, a scale that is not finite,
            or a back end that was requested by name and cannot serve the call.
        TypeError: an argument that is not an array, a number or a stream where one is expected.
    """
    return _attended("scaled_dot_product_attention_with_scores", locals())


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
    """``scaled_dot_product_attention_with_scores`` for keys and values packed by ``mx.quantize``.

    The kernels dequantise in registers (AtomGradient 2026, section 3.5) and write nothing dense to
    memory. Slices of a larger buffer are read in place. The composed back end, and GPU calls with
    more than 8 queries, dequantise to float32 first.

    Keys or values may also be codes of rotated rows (``kv_format="turbo3"``; docs/design.md). Pass
    words, norms (float32 [B, Hkv, N, 1]) and None instead of words, scales and biases; D must be a
    power of two from 32 to 1,024, and codes have 2, 3 or 4 bits. With such values, the keys may be
    one array in the dtype of the queries, with None for scales and biases.

    Args:
        q: queries [B, Hq, Lq, D], float32, float16 or bfloat16.
        k_w: packed keys, uint32 [B, Hkv, N, D * bits / 32]; Hq is a multiple of Hkv.
        k_s: scales of the keys, [B, Hkv, N, D / group_size], of any of the three float dtypes.
        k_b: biases of the keys, same shape and dtype as the scales.
        v_w: packed values, uint32 [B, Hkv, N, Dv * v_bits / 32].
        v_s: scales of the values, [B, Hkv, N, Dv / group_size], same dtype as the keys' scales.
        v_b: biases of the values, same shape and dtype as their scales.
        scale: finite factor for the products, usually 1 / sqrt(D).
        bits: bits per element of the keys, and of the values unless ``v_bits`` is given: 2, 3, 4,
            5, 6 or 8.
        group_size: elements that share a scale and a bias: 32, 64 or 128.
        v_bits: bits per element of the values.
        mask: None, ``"causal"``, or an array, as in the dense operation.
        sinks: learned logits [Hq], as in the dense operation.
        row_bias: float32 [B, Hkv, N], as in the dense operation.
        return_lse, stream: as in the dense operation.
        sparse_v_threshold: pairs of smaller weight are left out of ``out``, and kernels do not
            read their value rows (Turney 2026); scores and lse do not change. 0 turns it off;
            1e-6 is a good value. ``out`` changes by at most the skipped weight times max|V|.
        return_skipped: also return the share of rows that each query skipped.

    Returns:
        ``(out, scores)``, followed by ``lse`` and ``skipped`` if requested. The first three are
        those of the dense operation for the dequantised rows. ``skipped`` is float32 [B, Hq, Lq]:
        the share of the N rows whose weight was below the threshold; masked pairs do not count.

    Raises:
        ValueError: as in the dense operation; sizes that do not match ``bits`` and
            ``group_size``; or a threshold outside 0 <= threshold < 1.
        TypeError: as in the dense operation.
    """
    return _attended("scaled_dot_product_attention_quantized_with_scores", locals())


def attention_and_accumulate(
    q: mx.array,
    k: mx.array | Parts,
    v: mx.array | Parts,
    importance: mx.array,
    *,
    scale: float,
    kind: Literal["ema", "mass"] = "ema",
    decay: float = 0.95,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    row_bias: mx.array | None = None,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    sparse_v_threshold: float = 0.0,
    stream: StreamLike = None,
) -> tuple[mx.array, mx.array]:
    """Attention that adds its scores to each row's importance; a back end need not store them.

    ``kind="ema"``: ``scaled_dot_product_attention_with_scores`` followed by ``accumulate_scores``
    with this ``decay``. ``kind="mass"``, the attention mass of Zhang et al. 2023 (H2O), adds to the
    importance of each row its weights ``exp(scores - lse)``, summed over all queries and over the
    query heads of its KV head. NaN, which marks an unscored row, counts as 0; a fully masked query
    adds nothing. Arguments and errors are those of the two operations; at most 128 queries.
    ``importance`` is float32 [B, Hkv, N].
    ``k`` and ``v`` may be packed, each a tuple of words, scales and biases. The quantised operation
    is then used, with the arguments ``bits``, ``group_size``, ``v_bits`` and
    ``sparse_v_threshold``.

    Returns:
        ``(out, importance)``: [B, Hq, Lq, Dv] in the dtype of the queries, and float32
        [B, Hkv, N]. Evaluating ``out`` evaluates both.
    """
    op = "attention_and_accumulate"
    given = checked_arguments(op, locals())
    _check_pair(op, given)
    if sparse_v_threshold != 0 and not isinstance(given["keys"], tuple):
        raise ValueError(
            f"[{op}] sparse_v_threshold is {sparse_v_threshold}, expected 0 with dense rows."
        )
    before, factor = given.pop("importance"), given.pop("decay")
    factor = factor if given.pop("kind") == "ema" else None
    with placed(op, stream):
        request = attention_request(**given)
        return resolve(op=op).serving(request, op).accumulate(request, before, factor)


def prefill_scores(
    q: mx.array,
    k: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    row_bias: mx.array | None = None,
    kind: Literal["ema", "mass"] = "ema",
    importance: mx.array | None = None,
    decay: float = 0.95,
    queries: int = accumulating.MAX_QUERIES,
    stream: StreamLike = None,
) -> mx.array:
    """The scores of a chunk of queries, accumulated per key and KV head.

    ``kind="ema"``: the moving average of AtomGradient 2026, section 3.2, over the last ``queries``
    queries in order, computed in blocks of keys. The result is the same as accumulating the scores
    of ``scaled_dot_product_attention_with_scores``. Each query has ``decay`` times the weight of
    the next, so older ones are left out.

    ``kind="mass"``: the attention mass of Zhang et al. 2023 (H2O), computed in blocks of queries:
    the weights ``exp(scores - lse)``, summed over all queries and over the query heads of the KV
    head. A fully masked query adds nothing.

    Args:
        q: queries [B, Hq, Lq, D], float32, float16 or bfloat16.
        k: keys [B, Hkv, N, D], same dtype as the queries; Hq is a multiple of Hkv.
        scale: finite factor for the products.
        mask: as in ``scaled_dot_product_attention_with_scores``, for all Lq queries.
        sinks: learned logits [Hq] in the denominator of "mass"; they do not affect scores, and
            so not "ema".
        row_bias: float32 [B, Hkv, N], as in ``scaled_dot_product_attention_with_scores``.
        kind: "ema" or "mass".
        importance: for "ema", the average so far, float32 [B, Hkv, N], NaN for unscored rows;
            None: no row has been scored. "mass" starts at 0, so None is required.
        decay: for "ema", at least 0 and below 1.
        queries: for "ema", how many of the last queries count; at least 1.
        stream: stream or device to run on.

    Returns:
        float32 [B, Hkv, N], with "ema" NaN for rows that are still unscored. NaN in an additive
        mask counts as masked in "ema" and makes the mass of its KV head NaN.

        "ema" costs min(Lq, queries) * N products of q and k per query head. "mass" costs Lq * N, as
        many as attention itself. Logits are computed in a few blocks of 2 MiB, on GPUs of 16 MiB.
        A block holds at least one query by all keys ("mass"), or the counted queries by one key
        ("ema"). GPUs use MLX's own matrix products: no kernel here reads a chunk.

    Raises ValueError for shapes, dtypes or settings other than these, TypeError for other types.
    """
    op = "prefill_scores"
    given = checked_arguments(op, locals())
    before, factor, count = (given.pop(n) for n in ("importance", "decay", "counted_queries"))
    average = given.pop("kind") == "ema"
    if not average and before is not None:
        raise ValueError(f"[{op}] importance is given with kind {kind!r}, expected it with 'ema'.")
    with placed(op, stream):
        request = attention_request(values=k, **given)
        request = last_queries(request, count) if average else request
        return resolve(op=op).prefill_scores(request, before, factor if average else None)


def accumulate_scores(
    importance: mx.array,
    scores: mx.array,
    *,
    decay: float,
    masked: bool = True,
    stream: StreamLike = None,
) -> mx.array:
    """Update the moving average ``C = a*C + (1-a)*|s|`` of every row, query by query.

    ``s`` is the mean of a row's scores over the unmasked query heads of its KV head. If all are
    masked, C does not change. The first unmasked score of a row sets ``C = |s|``; in AtomGradient
    2026, sec. 3.2, C starts at 0.

    Args:
        importance: C, float32 [B, H, N], NaN for unscored rows.
        scores: float32 [B, Hq, Lq, N], -inf (or NaN) where masked; Hq is a multiple of H, and Lq
            is at most 128.
        decay: a, at least 0 and below 1.
        masked: False if every score is finite, which saves work on some back ends.
        stream: stream or device to run on.

    Returns:
        float32 [B, H, N]. With one query, results are identical bit for bit on all CPU back ends.

    Raises ValueError for shapes, dtypes or a decay other than these, TypeError for other types.
    """
    return _served("accumulate_scores", locals(), masked=bool(masked))


def keep_indices(
    scores: mx.array,
    positions: mx.array,
    *,
    keep: int,
    sink_size: int = 0,
    recent_start: PerSequence | None = None,
    stream: StreamLike = None,
) -> mx.array:
    """Slots of the rows to keep when a cache is reduced to ``keep`` rows per head.

    Best first: protected rows (``0 <= position < sink_size``, or ``position >= recent_start``);
    the others by descending score (infinities are allowed); rows whose score is NaN; padding.
    Among equals, and among protected rows, the lower position is kept; for padding the lower slot.

    Args:
        scores: float32 [B, H, N], one per row.
        positions: int32 [B, H, N], distinct within a head and below 2**30; negative: padding.
        keep: rows to keep, 1 to N.
        sink_size: number of first positions that are protected.
        recent_start: first position of the protected recent window, or int32 [B], one for each
            sequence; None: no window.
        stream: stream or device to run on.

    Returns:
        uint32 [B, H, keep], ascending.

    Raises ValueError for shapes, dtypes or counts other than these, TypeError for other types.
    """
    return _served("keep_indices", locals())


def key_diversity(keys: mx.array, *, stream: StreamLike = None) -> mx.array:
    """The negated cosine of each key with the mean of the normalised keys of its head.

    Args:
        keys: [B, H, N, D], float32, float16 or bfloat16.
        stream: stream or device to run on.

    Returns:
        float32 [B, H, N]; a key of zeros gets 0. Computed in float32.

    Raises ValueError for another shape or dtype, TypeError for another type.
    """
    return _served("key_diversity", locals())


def quantize_append(
    quantised_keys: Parts,
    quantised_values: Parts,
    new_keys: mx.array,
    new_values: mx.array,
    slots: mx.array,
    *,
    bits: int = 8,
    group_size: int = 64,
    v_bits: int | None = None,
    stream: StreamLike = None,
) -> tuple[Parts, Parts]:
    """Quantise new rows of K and V straight into their slots.

    The number of arrays identifies the format, for keys and values separately:

    - three (words, scales and biases): the packed rows equal ``mx.quantize`` on the same device bit
      for bit (affine mode; Metal and the CPU round differently);
    - two (words and norms): codes of rotated rows (``kv_format="turbo3"``; docs/design.md). Where
      an element lies midway between two levels to within float32 precision, either of the two
      codes may be written;
    - one: unquantised rows.

    Args:
        quantised_keys: words uint32 [B, H, N, D * bits / 32], scales and biases
            [B, H, N, D / group_size]; or words and norms, float32 [B, H, N, 1]; or ``(keys,)``,
            [B, H, N, D].
        quantised_values: the same with Dv and ``v_bits``.
        new_keys: [B, H, L, D], float32, float16 or bfloat16: the dtype of the scales, or of the
            unquantised keys.
        new_values: [B, H, L, Dv], likewise for the values.
        slots: uint32 [B, H, L], the rows to write, distinct within a head; a slot beyond the last
            row means the last row.
        bits: bits of the keys: 2, 3, 4, 5, 6 or 8; of codes 2, 3 or 4.
        group_size: 32, 64 or 128; it must divide D and Dv. Codes ignore it: there D and Dv must be
            powers of two from 32 to 1,024.
        v_bits: bits of the values; None: ``bits``.
        stream: stream or device to run on.

    Returns:
        Keys and values, each in as many arrays as were passed. Evaluating the first array of the
        keys evaluates all. The arrays that were passed never change; if nothing else refers to
        them, their memory may be reused.

    Raises ValueError for shapes, dtypes or numbers other than these, TypeError for other types.
    """
    op = "quantize_append"
    for name, stored in (("keys", quantised_keys), ("values", quantised_values)):
        if not isinstance(stored, tuple | list):
            raise TypeError(
                f"[{op}] quantised {name} must be a tuple of words, scales and biases, of words "
                "and norms, or of the rows alone."
            )
    given = checked_arguments(op, locals())
    count = len(given["keys"])
    with placed(op, stream):
        found = resolve(op=op).quantize_append(**given)
    return tuple(found[:count]), tuple(found[count:])


def _served(op: str, arguments: dict[str, Any], **more: Any) -> mx.array:
    """Check the arguments, then call the operation of the best back end."""
    given = checked_arguments(op, arguments)
    with placed(op, arguments["stream"]):
        found: mx.array = getattr(resolve(op=op), op)(**given, **more)
    return found


def _attended(op: str, arguments: dict[str, Any]) -> tuple[mx.array, ...]:
    """The output and the scores, then lse and skipped shares if requested."""
    given, wanted = checked_arguments(op, arguments), ("return_lse", "return_skipped")
    _check_pair(op, given)
    asked: Any = {name: bool(arguments[name]) for name in wanted if name in arguments}
    with placed(op, arguments["stream"]):
        request = attention_request(**given, **asked)
        found = resolve(op=op).serving(request, op).attend(request)
    more = [found.lse] * request.return_lse + [found.skipped] * request.return_skipped
    return tuple(cast("list[mx.array]", [found.out, found.scores, *more]))


def _check_pair(op: str, given: dict[str, Any]) -> None:
    """Raise if the kinds of keys and values do not go together."""
    keys, values = given["keys"], given["values"]
    if isinstance(keys, tuple) != isinstance(values, tuple):
        raise TypeError(
            f"[{op}] keys and values are {type(keys).__name__} and {type(values).__name__}, "
            "expected two arrays, or two tuples of words, scales and biases."
        )
    if isinstance(keys, tuple) and (len(values) == 1 or (len(keys), len(values)) == (1, 3)):
        raise ValueError(
            f"[{op}] keys and values are {len(keys)} and {len(values)} arrays, expected both "
            "packed, or one array of keys beside codes."
        )
