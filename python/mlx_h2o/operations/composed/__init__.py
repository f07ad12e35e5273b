"""The composed back end: the semantics of every operation in plain MLX operations.

It runs wherever MLX runs, serves every valid request, and is the definition that tests compare the
other back ends with. Inputs are upcast to float32, logits and softmax are float32, and the output
is rounded once, to the dtype of the queries.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_h2o.operations.composed import accumulating, turbo
from mlx_h2o.operations.requests import (
    MASK_THRESHOLDS,
    QUERIES,
    AttentionRequest,
    AttentionResult,
    PerSequence,
    StoredRows,
    are_codes,
    in_blocks,
)

_GREATEST = 2**31 - 1
_PADDING, _UNSCORED = 1 - 2**31, 2 - 2**31  # below the bits of -inf
_LOWEST = mx.finfo(mx.float32).min
# Arrays, because MLX would convert numbers at every call.
_NEVER, _LEAST, _NOTHING = mx.array(-mx.inf), mx.array(_LOWEST), mx.array(0.0)
_LEAST_NORM = 1e-12  # a key of zeros has the direction 0, not NaN


def logits(request: AttentionRequest) -> mx.array:
    """scale * q.k + mask + row_bias, float32 [B, Hq, Lq, N], -inf where the pair is masked."""
    return _logits(request).reshape(*request.queries.shape[:3], -1)


def _logits(request: AttentionRequest) -> mx.array:
    """``logits`` as [B, Hkv, Hq / Hkv * Lq, N]: the queries of one KV head are consecutive."""
    mask, bias, packing = request.mask, request.row_bias, (request.bits, request.group_size)
    found = _dots(request.queries, request.keys, request.scale, bias, *packing)
    rows = found.shape[3]
    if mask is None and request.causal and request.queries.shape[2] > 1:
        mask = masked(request).mask
    if mask is not None:
        # A mask that is the same for all queries of a sequence fits as it is.
        grouped, apart = found.shape, mask.shape[1:3] != (1, 1)
        if apart:
            found = found.reshape(*request.queries.shape[:3], rows)
        if mask.dtype == mx.bool_:
            found = mx.where(mask, found, _NEVER)
        else:
            added = mask.astype(mx.float32)
            # NaN compares false: it is not masked, and reaches the output of its query.
            found = mx.where(added <= MASK_THRESHOLDS[mask.dtype], _NEVER, found + added)
        found = found.reshape(grouped) if apart else found
    if bias is not None and request.bias_masks:
        # Last, so that a NaN of the mask does not survive in a row that its bias masks.
        found = mx.where(bias[:, :, None, :rows] <= _LOWEST, _NEVER, found)
    return found


def _dots(
    queries: mx.array, keys: StoredRows, scale: float, bias: mx.array | None, bits: int = 8,
    group_size: int = 64,
) -> mx.array:  # fmt: skip
    """scale * q.k + bias, float32 [B, Hkv, Hq / Hkv * Lq, N]."""
    batch, heads, rows, _ = (keys[0] if isinstance(keys, tuple) else keys).shape
    bias = None if bias is None else bias[:, :, None, :rows]
    queries = queries.reshape(batch, heads, -1, queries.shape[3])
    if isinstance(keys, mx.array):  # one operation; a float32 summand upcasts its factors
        return mx.addmm(
            _NOTHING if bias is None else bias, queries, keys.swapaxes(2, 3), alpha=scale
        )
    found = _product(queries.astype(mx.float32) * scale, keys, bits, group_size, transpose=True)
    return found if bias is None else bias + found


def _product(
    left: mx.array, rows: StoredRows, bits: int, group_size: int, transpose: bool = False
) -> mx.array:
    """``left``, float32 [B, Hkv, n, ...], times rows, which are upcast first, as are scales and
    biases of packed ones."""
    if not isinstance(rows, tuple):
        return left @ (rows.swapaxes(2, 3) if transpose else rows)
    words, scales, biases = rows
    return mx.quantized_matmul(
        left, words, scales.astype(mx.float32), biases.astype(mx.float32),
        transpose=transpose, group_size=group_size, bits=bits,
    )  # fmt: skip


def masked(request: AttentionRequest) -> AttentionRequest:
    """The request with its causal mask as an array, so that parts of it need not make their own:
    the last query sees the last key."""
    if not request.causal:
        return request
    length, rows = request.queries.shape[2], request.row_count
    seen = mx.arange(rows) <= mx.arange(rows - length, rows)[:, None]
    return replace(request, mask=mx.broadcast_to(seen, (*request.queries.shape[:2], *seen.shape)))


def weights(scores: mx.array, sinks: mx.array | None = None, masked: bool = True) -> mx.array:
    """The softmax over the last axis of scores [B, Hq, L, N], with sinks [Hq] in its denominator:
    0 if a query has nothing to attend to. ``masked`` is False if no pair is masked."""
    if sinks is not None:
        return weights_of(scores, lse_of(scores, sinks))
    found = mx.softmax(scores, -1)
    if masked:  # a query that sees something keeps its NaN
        nothing = mx.max(scores, axis=-1, keepdims=True) == _NEVER
        found = mx.where(nothing, _NOTHING, found)
    return found


def lse_of(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """The logarithm of the softmax's denominator, [B, Hq, L]. NaN instead of +inf, which makes the
    softmax NaN, as in MLX's own attention."""
    lse = mx.logsumexp(scores, axis=-1)
    if sinks is not None:
        lse = mx.logaddexp(lse, sinks.astype(mx.float32)[:, None])
    return mx.where(lse == mx.inf, mx.nan, lse)


def weights_of(scores: mx.array, lse: mx.array) -> mx.array:
    """The weights of scores with a known ``lse`` [B, Hq, L], which includes sinks."""
    return mx.exp(scores - mx.maximum(mx.expand_dims(lse, -1), _LOWEST))


def dense(rows: StoredRows, bits: int = 8, group_size: int = 64) -> mx.array:
    """The rows as float32 [B, Hkv, N, D]; scales and biases of packed rows are upcast first, and
    codes stay in their rotated basis."""
    if isinstance(rows, mx.array):
        return rows.astype(mx.float32)
    if are_codes(rows):
        words, norms = rows
        return turbo.rotated_rows(words, norms, bits)
    words, scales, biases = rows
    pair = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(words, *pair, group_size=group_size, bits=bits)


def attention(request: AttentionRequest) -> AttentionResult:
    """Attention as ``fast`` documents it; packed rows are dequantised to float32 first."""
    # On CUDA, MLX cannot multiply by packed rows of every shape.
    if request.has_codes or (request.is_packed and mx.cuda.is_available()):
        keys = dense(request.keys, request.bits, request.group_size)
        values = dense(request.values, request.v_bits, request.group_size)
        found = attention(replace(turbo.turned(request), keys=keys, values=values))
        return found._replace(out=turbo.output(request, found.out))
    asked = request.return_scores or request.return_lse or request.return_skipped
    if asked or request.queries.shape[2] <= QUERIES:
        return _attend(request)
    return in_blocks(masked(request), _attend)


def _attend(request: AttentionRequest) -> AttentionResult:
    pairs, sinks = request.queries.shape[:3], request.sinks
    scores, hides = _logits(request), request.hides
    if sinks is None:
        shares = weights(scores, masked=hides)
    else:
        shares = scores.reshape(*pairs, -1)
        shares = weights(shares, sinks, hides).reshape(scores.shape)
    skipped = mx.zeros(pairs) if request.return_skipped else None
    read = shares
    if request.sparse_v_threshold > 0:
        below = shares < request.sparse_v_threshold  # NaN compares false, and stays
        read = mx.where(below, 0.0, shares)
        if request.return_skipped:
            below = below & (scores != -mx.inf)
            skipped = below.astype(mx.float32).mean(axis=-1).reshape(pairs)
    out = _product(read, request.values, request.v_bits, request.group_size)
    out = out.reshape(*pairs, -1).astype(request.queries.dtype)
    whole = scores.reshape(*pairs, -1)
    lse = lse_of(whole, sinks) if request.return_lse else None
    return AttentionResult(out, whole if request.return_scores else None, lse, skipped, shares)


def step(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    importance: mx.array,
    *,
    scale: float,
    mask: mx.array | None = None,
    row_bias: mx.array | None = None,
    causal: bool = False,
    sinks: mx.array | None = None,
    **packing: Any,
) -> tuple[mx.array, mx.array] | None:
    """The output over arrays and the new mass, in few calls; None for a mask that is not bool or
    not the same for all queries of a sequence, and for the other options."""
    alike = mask is None or (mask.dtype == mx.bool_ and mask.shape[1:3] == (1, 1))
    if causal or packing or sinks is not None or not alike:
        return None
    scores = _dots(queries, keys, scale, row_bias)
    shares = mx.softmax(scores if mask is None else mx.where(mask, scores, _LEAST), -1)
    if mask is not None:  # a call less than a search for -inf; 0 if a query sees nothing
        shares = mx.where(mask, shares, _NOTHING)
    out = (shares @ values).reshape(*queries.shape[:3], -1)
    new = accumulating.add_mass(importance, shares)
    return mx.depends(out.astype(queries.dtype), [new]), new


def beside_rows(value: PerSequence) -> PerSequence:
    """The value in a shape that broadcasts against [B, H, N]."""
    return value.reshape(-1, 1, 1) if isinstance(value, mx.array) else value


def _ordered_bits(scores: mx.array) -> mx.array:
    """int32 in the order of the float32 scores; -0 and +0 are the same."""
    bits = (scores + 0.0).view(mx.int32)
    return mx.where(bits < 0, bits ^ _GREATEST, bits)


def retention_key(
    scores: mx.array,
    positions: mx.array,
    sink_size: int = 0,
    recent_start: PerSequence | None = None,
) -> mx.array:
    """int64 [B, H, N], higher is kept longer; distinct within a head, so no tie remains.

    ``(rank << 32) - position``. Scored rows rank by their scores, protected rows above all of them,
    unscored rows below, and padding lowest, with its slot instead of a position.
    """
    protected = positions < sink_size
    if recent_start is not None:
        protected = protected | (positions >= beside_rows(recent_start))
    padding = positions < 0
    ranks = mx.where(mx.isnan(scores), _UNSCORED, _ordered_bits(scores))
    ranks = mx.where(protected, _GREATEST, ranks)
    ranks = mx.where(padding, _PADDING, ranks)
    place = mx.where(padding, mx.arange(positions.shape[2], dtype=mx.int32), positions)
    return (ranks.astype(mx.int64) << 32) - place


def keep_indices(
    scores: mx.array,
    positions: mx.array,
    *,
    keep: int,
    sink_size: int = 0,
    recent_start: PerSequence | None = None,
) -> mx.array:
    """Slots of the rows to keep, uint32 [B, H, keep], ascending."""
    key = retention_key(scores, positions, sink_size, recent_start)
    count = key.shape[2] - keep
    if count == 0:
        return mx.broadcast_to(mx.arange(keep, dtype=mx.uint32), key.shape)
    order = mx.argpartition(key, count, axis=-1)
    return mx.sort(order[..., count:], axis=-1)


def key_diversity(keys: mx.array) -> mx.array:
    """The negated cosine of each of the keys [B, H, N, D] with the mean of the normalised keys of
    its head, float32."""
    directions = _normalised(keys.astype(mx.float32))
    mean = _normalised(mx.mean(directions, axis=2, keepdims=True))
    return -mx.squeeze(directions @ mx.swapaxes(mean, -1, -2), -1)


def _normalised(vectors: mx.array) -> mx.array:
    norm = mx.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / mx.maximum(norm, _LEAST_NORM)
