"""The slow float64 reference of every operation, in NumPy, one query at a time.

It shares no code with the package. Tests, golden vectors, the parity runner and the benchmarks
import it. It states the semantics of docs/python.md as directly as it can; speed is no concern.
"""

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

ULP = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# finfo(dtype).min / 2: at or below it an additive mask masks.
MASK_THRESHOLD = {
    "float32": float(np.finfo(np.float32).min) / 2,
    "float16": float(np.finfo(np.float16).min) / 2,
    "bfloat16": -(2.0 - 2.0**-7) * 2.0**127 / 2,
}

# At or below it a row bias masks its row.
LOWEST = float(np.finfo(np.float32).min)

# Older queries of a chunk weigh 0.95 ** 128 = 0.14 % and are left out of the average.
EMA_QUERIES = 128


class Attention(NamedTuple):
    """out [B, Hq, Lq, Dv], scores [B, Hq, Lq, N] and lse [B, Hq, Lq], all float64."""

    out: np.ndarray
    scores: np.ndarray
    lse: np.ndarray


class Tolerances(NamedTuple):
    """Largest absolute error that a leg may have in each output."""

    out: float
    scores: float
    lse: float


def dtype_name(array: mx.array | np.ndarray) -> str:
    """``float16`` for both libraries."""
    return str(array.dtype).removeprefix("mlx.core.")


def float64(array: mx.array | np.ndarray) -> np.ndarray:
    """The values as float64 (bool too, as 0 and 1)."""
    if isinstance(array, mx.array):
        array = np.array(array.astype(mx.float32))
    return np.asarray(array, dtype=np.float64)


def masked_pairs(mask, shape: tuple[int, ...], row_bias=None) -> tuple[np.ndarray, np.ndarray]:
    """(masked, bias) of a mask and a row bias, both broadcast to ``shape`` = [B, Hq, Lq, N].

    A pair that either of the two masks is masked, even if the other is NaN.
    """
    masked, bias = _of_mask(mask, shape)
    if row_bias is None:
        return masked, bias
    own = float64(row_bias)[:, :, None]
    own = np.repeat(own, shape[1] // own.shape[1], axis=1)
    return masked | (own <= LOWEST), bias + own


def _of_mask(mask, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    length, rows = shape[2:]
    masked, bias = np.zeros(shape, bool), np.zeros(shape)
    if mask is None:
        return masked, bias
    if isinstance(mask, str):
        assert mask == "causal"
        for query in range(length):
            masked[:, :, query, max(0, rows - length + query + 1) :] = True
    elif dtype_name(mask).startswith("bool"):
        masked = np.broadcast_to(float64(mask) == 0, shape)
    else:
        bias = np.broadcast_to(float64(mask), shape)
        masked = bias <= MASK_THRESHOLD[dtype_name(mask)]
    return masked, bias


def dequantized(words, scales, biases, *, bits: int, group_size: int) -> np.ndarray:
    """Rows that ``mx.quantize`` packed, float64: a bit stream, lowest bit first."""
    stream = np.unpackbits(
        np.ascontiguousarray(np.array(words)).view(np.uint8), axis=-1, bitorder="little"
    )
    elements = stream.reshape(*stream.shape[:-1], -1, bits) @ 2.0 ** np.arange(bits)
    scale, bias = (np.repeat(float64(array), group_size, axis=-1) for array in (scales, biases))
    return elements * scale + bias


def attention(
    queries, keys, values, *, scale, mask=None, sinks=None, row_bias=None, sparse_v_threshold=0.0
) -> Attention:
    """Attention with its scores; arguments as in ``mlx_h2o.fast``, MLX or NumPy arrays."""
    q, k, v = float64(queries), float64(keys), float64(values)
    batch, heads, length, _ = q.shape
    kv_heads, rows = k.shape[1:3]
    masked, bias = masked_pairs(mask, (batch, heads, length, rows), row_bias)
    out = np.zeros((batch, heads, length, v.shape[3]))
    scores = np.full((batch, heads, length, rows), -np.inf)
    lse = np.full((batch, heads, length), -np.inf)
    for b, h, i in np.ndindex(batch, heads, length):
        row = h // (heads // kv_heads)
        seen = np.flatnonzero(~masked[b, h, i])
        logits = scale * (k[b, row, seen] @ q[b, h, i]) + bias[b, h, i, seen]
        scores[b, h, i, seen] = logits
        terms = logits if sinks is None else np.append(logits, float64(sinks)[h])
        peak = terms.max(initial=-np.inf)
        if not peak < np.inf:  # NaN too
            lse[b, h, i], out[b, h, i] = np.nan, np.nan
        if not np.isfinite(peak):
            continue
        lse[b, h, i] = peak + math.log(np.exp(terms - peak).sum())
        weights = np.exp(logits - lse[b, h, i])
        weights[weights < sparse_v_threshold] = 0
        out[b, h, i] = weights @ v[b, row, seen]
    return Attention(out, scores, lse)


def _weights(expected: Attention) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.exp(expected.scores - expected.lse[..., None])


def dropped_mass(expected: Attention, sparse_v_threshold: float, least: float = 0.0) -> float:
    """The largest sum, of any query, of its weights from ``least`` to below the threshold."""
    weights = _weights(expected)
    dropped = (weights < sparse_v_threshold) & (weights >= least)
    return float(np.where(dropped, weights, 0).sum(-1).max())


def skipped(expected: Attention, sparse_v_threshold: float) -> np.ndarray:
    """Share of the rows whose weight is below the threshold, [B, Hq, Lq]; masked ones are not."""
    return ((_weights(expected) < sparse_v_threshold) & (expected.scores != -np.inf)).mean(-1)


def retention_order(scores, positions, *, sink_size=0, recent_start=None) -> list[int]:
    """Slots of one head, best first."""

    def rank(slot: int) -> tuple[float, ...]:
        score, position = float(scores[slot]), int(positions[slot])
        if position < 0:
            return (3, 0.0, slot)
        if position < sink_size or (recent_start is not None and position >= recent_start):
            return (0, 0.0, position)
        if math.isnan(score):
            return (2, 0.0, position)
        return (1, -score, position)

    return sorted(range(len(scores)), key=rank)


def of_sequence(numbers, sequence: int):
    """The number for one sequence, from one for all or one for each. None stays None."""
    if numbers is None:
        return None
    flat = np.array(numbers).reshape(-1)
    return int(flat[sequence if flat.size > 1 else 0])


def keep_indices(scores, positions, *, keep, sink_size=0, recent_start=None) -> np.ndarray:
    """Slots to keep, ascending, uint32 [B, H, keep]. recent_start: one for all, or one for each."""
    s, p = np.array(scores), np.array(positions)
    kept = np.zeros((*s.shape[:2], keep), np.uint32)
    for head in np.ndindex(*s.shape[:2]):
        start = of_sequence(recent_start, head[0])
        order = retention_order(s[head], p[head], sink_size=sink_size, recent_start=start)
        kept[head] = sorted(order[:keep])
    return kept


def accumulate(seen, scores, *, decay, queries=EMA_QUERIES) -> np.ndarray:
    """C after a chunk: the moving average of AtomGradient 2026, section 3.2, query by query.

    ``seen`` is C before, [B, Hkv, N], NaN where a row has no score yet; ``scores`` are those of
    attention, [B, Hq, Lq, N], of which the last ``queries`` queries count. C takes in |s|, where
    s is the mean over the unmasked query heads of the group; the first one sets C; pairs that
    are masked for the whole group leave it unchanged.
    """
    total, s = float64(seen).copy(), float64(scores)
    groups = s.reshape(*total.shape[:2], -1, *s.shape[2:])
    for query in range(max(0, s.shape[2] - queries), s.shape[2]):
        found = groups[:, :, :, query]
        unmasked = found > -np.inf
        heads = unmasked.sum(axis=2)
        new = np.abs(np.where(unmasked, found, 0).sum(axis=2)) / np.maximum(heads, 1)
        after = np.where(np.isnan(total), new, decay * total + (1 - decay) * new)
        total = np.where(heads > 0, after, total)
    return total


def key_diversity(keys) -> np.ndarray:
    """The negated cosine of each key with the mean of the normalised keys of its head."""
    k = float64(keys)
    directions = k / np.maximum(np.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
    mean = directions.mean(axis=2, keepdims=True)
    mean = mean / np.maximum(np.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
    return -(directions * mean).sum(-1)


def attention_mass(scores, lse, kv_heads: int) -> np.ndarray:
    """The weights that each key gets, over all queries and query heads: [B, Hkv, N] (H2O).

    ``scores`` and ``lse`` are those of attention; a query that sees nothing adds nothing.
    """
    s, total = float64(scores), float64(lse)
    mass = np.zeros((s.shape[0], kv_heads, s.shape[3]))
    for b, h, i in np.ndindex(*s.shape[:3]):
        if total[b, h, i] != -np.inf:
            mass[b, h // (s.shape[1] // kv_heads)] += np.exp(s[b, h, i] - total[b, h, i])
    return mass


def worst_error(found, expected) -> float:
    """Largest absolute difference; infinite if shapes, NaN or infinities do not match."""
    a, b = float64(found), float64(expected)
    if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
        return math.inf
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return math.inf
    if not np.isfinite(a[finite]).all():
        return math.inf
    return float(np.abs(a[finite] - b[finite]).max(initial=0.0))


def error_ratio(error: float, allowed: float) -> float:
    """Error as a share of its tolerance; at most 1 passes. No error passes no tolerance."""
    if error == 0:
        return 0.0
    return error / allowed if allowed > 0 else math.inf


def naive_attention(
    queries, keys, values, *, scale, mask=None, sinks=None, row_bias=None
) -> Attention:
    """The same computation by stock MLX operations in the dtype of the queries.

    Its error against float64 is the yardstick of the tolerances. Float arrays of MLX only.
    """
    dtype = queries.dtype
    group = queries.shape[1] // keys.shape[1]
    keys, values = (mx.repeat(a, group, axis=1) for a in (keys, values))
    scores = (queries * scale) @ keys.swapaxes(-1, -2)
    masked, bias = masked_pairs(mask, scores.shape, row_bias)
    scores = scores + mx.array(np.where(masked, 0, bias).astype(np.float32)).astype(dtype)
    scores = mx.where(mx.array(masked), mx.array(-math.inf, dtype), scores)
    columns = scores
    if sinks is not None:
        sink = mx.broadcast_to(sinks.astype(dtype)[None, :, None, None], (*scores.shape[:3], 1))
        columns = mx.concatenate([scores, sink], axis=-1)
    weights = mx.softmax(columns, axis=-1, precise=True)[..., : scores.shape[-1]]
    lse = mx.logsumexp(columns.astype(mx.float32), axis=-1)
    return Attention(*(float64(a) for a in (weights @ values, scores, lse)))


def _finite_error(found: np.ndarray, expected: np.ndarray) -> float:
    both = np.isfinite(found) & np.isfinite(expected)
    return float(np.abs(found[both] - expected[both]).max(initial=0.0))


def tolerance(naive_error: float, magnitude: float, dtype: str) -> float:
    """max(2 x naive error of the same precision, 4 ulp of the output dtype * magnitude)."""
    return max(2 * naive_error, 4 * ULP[dtype] * magnitude)


def tolerances(
    queries, keys, values, *, scale, mask=None, sinks=None, row_bias=None,
    expected: Attention | None = None,
) -> Tolerances:  # fmt: skip
    """The tolerances of one attention call, given MLX arrays.

    The magnitude of ``out`` is max |V|; of the scores, which are float32 sums over D whatever
    the inputs are, it is the largest sum of absolute products; lse inherits the scores' error.
    """
    arguments = {"scale": scale, "mask": mask, "sinks": sinks, "row_bias": row_bias}
    if expected is None:
        expected = attention(queries, keys, values, **arguments)
    naive = naive_attention(queries, keys, values, **arguments)
    wide = [a.astype(mx.float32) for a in (queries, keys, values)]
    exact = naive if queries.dtype == mx.float32 else naive_attention(*wide, **arguments)

    group = queries.shape[1] // keys.shape[1]
    products = np.abs(float64(queries)) @ np.repeat(np.abs(float64(keys)), group, axis=1).swapaxes(
        -1, -2
    )
    masked, bias = masked_pairs(mask, products.shape, row_bias)
    products = abs(scale) * products + np.abs(np.where(masked | ~np.isfinite(bias), 0, bias))
    seen = products[~masked]
    for_scores = tolerance(
        _finite_error(exact.scores, expected.scores), float(seen.max(initial=0.0)), "float32"
    )
    size = np.abs(expected.lse[np.isfinite(expected.lse)]).max(initial=1.0)
    return Tolerances(
        out=tolerance(
            _finite_error(naive.out, expected.out),
            float(np.abs(float64(values)).max()),
            dtype_name(queries),
        ),
        scores=for_scores,
        lse=for_scores + tolerance(_finite_error(exact.lse, expected.lse), float(size), "float32"),
    )
