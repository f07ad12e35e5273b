"""The composed back end: the semantics of every operation in plain MLX operations.

It runs wherever MLX runs, serves every request that validation lets through, and is the
definition that the other back ends are compared with. Inputs are upcast to float32, logits and
softmax are float32, and the output is rounded once, to the dtype of the queries.
"""

from dataclasses import replace

import mlx.core as mx

from mlx_h2o.operations import turbo
from mlx_h2o.operations.placement import placed
from mlx_h2o.operations.requests import (
    AttentionRequest,
    AttentionResult,
    PerSequence,
    RetentionRequest,
    StoredRows,
    TurboRows,
)

name = "composed"

# Classes of rows, the worst first, in the two upper bits of the retention key.
_PADDING, _UNSCORED, _SCORED, _PROTECTED = range(4)
_POSITION_BITS = 30
_LOWEST = mx.finfo(mx.float32).min


def unavailable_reason() -> str:
    """Empty: plain MLX operations run on every MLX back end."""
    return ""


def refuses(request: AttentionRequest) -> str:
    """Empty: there is nothing valid that it cannot serve."""
    return ""


def logits(request: AttentionRequest) -> mx.array:
    """scale * q.k + mask + row_bias, float32 [B, Hq, Lq, N], -inf where the pair is masked."""
    return _masked(request, _rows_of_products(request) @ _columns(request.keys))


def _rows_of_products(request: AttentionRequest) -> mx.array:
    """scale * q, the query heads of one KV head as rows of one product: K is not repeated."""
    batch, kv_heads, _, size = request.keys.shape
    queries = _float32(request.queries) * request.scale
    return queries.reshape(batch, kv_heads, -1, size)


def _columns(keys: StoredRows) -> mx.array:
    return dense(keys).swapaxes(-1, -2)


def _masked(request: AttentionRequest, products: mx.array) -> mx.array:
    batch, heads, length, _ = request.queries.shape
    rows = request.keys.shape[2]
    if request.row_bias is None:
        return _masked_pairs(request, products.reshape(batch, heads, length, rows))
    own = request.row_bias[:, :, None, :rows]  # beside the products of its KV head
    logits = _masked_pairs(request, (products + own).reshape(batch, heads, length, rows))
    # Last: a row that its bias masks meets no NaN of the mask.
    grouped = mx.where(own <= _LOWEST, -mx.inf, logits.reshape(products.shape))
    return grouped.reshape(logits.shape)


def _masked_pairs(request: AttentionRequest, logits: mx.array) -> mx.array:
    length, rows = logits.shape[2:]
    if request.causal:
        last = mx.arange(rows - length, rows)[:, None]
        return mx.where(mx.arange(rows) <= last, logits, -mx.inf)
    mask = request.mask
    if mask is None:
        return logits
    if mask.dtype == mx.bool_:
        return mx.where(mask, logits, -mx.inf)
    bias = mask.astype(mx.float32)
    # NaN compares false: it is not masked, and reaches the output of its query.
    return mx.where(bias <= request.mask_threshold, -mx.inf, logits + bias)


def softmax_parts(scores: mx.array, sinks: mx.array | None) -> tuple[mx.array, mx.array, mx.array]:
    """``exp(scores - peak)``, their total with the sinks [Hq], and the peak: [B, Hq, L, N or 1].

    Where a query has nothing to attend to, the weights are 0, and the total is, without a sink.
    """
    peak = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(mx.float32)[None, :, None, None]
        peak = mx.maximum(peak, sinks)
    # With nothing to attend to the peak is -inf, and -inf - -inf would be NaN.
    peak = mx.maximum(peak, _LOWEST)
    weights = mx.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sinks - peak)
    return weights, total, peak


def _float32(array: mx.array) -> mx.array:
    return array if array.dtype == mx.float32 else array.astype(mx.float32)


def dense(rows: StoredRows) -> mx.array:
    """The rows as float32 [B, Hkv, N, D]; packed ones from scales and biases upcast first, codes in
    their own basis."""
    if isinstance(rows, mx.array):
        return _float32(rows)
    if isinstance(rows, TurboRows):
        return turbo.dense(rows)
    pair = _float32(rows.scales), _float32(rows.biases)
    return mx.dequantize(rows.words, *pair, group_size=rows.group_size, bits=rows.bits)


def attention(request: AttentionRequest) -> AttentionResult:
    """Attention as ``fast`` documents it; packed rows are dequantised to float32 first."""
    with placed(request.stream):
        if request.has_codes:
            keys, values = dense(request.keys), dense(request.values)
            turned = replace(turbo.turned(request), keys=keys, values=values)
            return turbo.turned_back(request, attention(turned))
        if request.is_packed:
            keys, values = dense(request.keys), dense(request.values)
            request = replace(request, keys=keys, values=values)
        return _attend(request, logits(request))


def _attend(request: AttentionRequest, scores: mx.array) -> AttentionResult:
    batch, heads, length, _ = request.queries.shape
    kv_heads, _, value_size = request.values.shape[1:]
    weights, total, peak = softmax_parts(scores, request.sinks)
    skipped = mx.zeros((batch, heads, length)) if request.return_skipped else None
    if request.sparse_v_threshold > 0:
        # NaN compares false, and stays.
        below = weights < request.sparse_v_threshold * total
        weights = mx.where(below, 0.0, weights)
        if request.return_skipped:
            skipped = (below & (scores != -mx.inf)).astype(mx.float32).mean(axis=-1)
    mixed = weights.reshape(batch, kv_heads, -1, weights.shape[-1]) @ dense(request.values)
    mixed = mixed.reshape(batch, heads, length, value_size)
    # The total is at least 1, or 0 where there is nothing to attend to.
    out = mixed / mx.maximum(total, 1.0)
    if request.queries.dtype != mx.float32:
        out = out.astype(request.queries.dtype)
    lse = (peak + mx.log(total)).squeeze(-1) if request.return_lse else None
    return AttentionResult(out, scores if request.return_scores else None, lse, skipped)


def beside_rows(value: PerSequence) -> PerSequence:
    """What broadcasts against [B, H, N]."""
    return value.reshape(-1, 1, 1) if isinstance(value, mx.array) else value


def _ordered_bits(scores: mx.array) -> mx.array:
    """uint32 in the order of the float32 scores; -0 and +0 are the same."""
    bits = (scores + 0.0).view(mx.uint32)
    sign = mx.array(1 << 31, mx.uint32)
    return mx.where(bits >= sign, ~bits, bits | sign)


def retention_key(request: RetentionRequest) -> mx.array:
    """uint64 [B, H, N], higher is kept longer; distinct within a head, so no tie remains.

    class << 62 | ordered score << 30 | (2^30 - 1 - position), where only the class of scored
    rows carries a score, and padding has its slot in the place of a position.
    """
    scores, positions = request.scores, request.positions
    protected = positions < request.sink_size
    if request.recent_start is not None:
        protected = protected | (positions >= beside_rows(request.recent_start))
    classes = mx.where(mx.isnan(scores), _UNSCORED, _SCORED)
    classes = mx.where(protected, _PROTECTED, classes)
    classes = mx.where(positions < 0, _PADDING, classes)
    ranked = mx.where(classes == _SCORED, _ordered_bits(scores), mx.array(0, mx.uint32))
    place = mx.where(positions < 0, mx.arange(positions.shape[-1], dtype=mx.int32), positions)
    place = ((1 << _POSITION_BITS) - 1) - place
    key = classes.astype(mx.uint64) << mx.array(62, mx.uint64)
    key = key | (ranked.astype(mx.uint64) << mx.array(_POSITION_BITS, mx.uint64))
    return key | place.astype(mx.uint64)


def keep_indices(request: RetentionRequest) -> mx.array:
    """Slots of the rows to keep, uint32 [B, H, N - count], ascending."""
    with placed(request.stream):
        key = retention_key(request)
        if request.count == 0:
            slots = mx.arange(key.shape[-1], dtype=mx.uint32)
            return mx.broadcast_to(slots, key.shape)
        order = mx.argpartition(key, request.count, axis=-1)
        return mx.sort(order[..., request.count :], axis=-1).astype(mx.uint32)
