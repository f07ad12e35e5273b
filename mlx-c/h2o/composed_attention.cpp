// The definition of attention in plain MLX operations. Inputs are upcast, logits and softmax are
// float32, and the output is rounded once.
#include <cmath>

#include "backend.h"
#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

// The pairs whose weight is below the threshold. NaN compares false, and stays.
Array dropped_pairs(const Softmax& parts, float threshold, mlx_stream s) {
  const Array least = call(mlx_multiply, parts.total, number(threshold), s);
  return call(mlx_less, parts.weights, least, s);
}

// The share of the N rows that a query drops though it sees them: [B, Hq, Lq].
Array share_of(const Array& dropped, const Array& scores, mlx_stream s) {
  const Array seen = call(mlx_not_equal, scores, number(-INFINITY), s);
  const Array skipped = upcast(call(mlx_logical_and, dropped, seen, s), s);
  return call(mlx_mean_axis, skipped, -1, false, s);
}

}  // namespace

Array dense(const Rows& rows, mlx_stream s) {
  if (!rows.packed()) {
    return upcast(rows.parts[0], s);
  }
  const Array scales = upcast(rows.parts[1], s), biases = upcast(rows.parts[2], s);
  return call(mlx_dequantize, rows.parts[0], scales, biases,
              mlx_optional_int{rows.group_size, true}, mlx_optional_int{rows.bits, true}, "affine",
              mlx_array{}, mlx_optional_dtype{MLX_FLOAT32, false}, s);
}

Array logits(const AttentionRequest& r) {
  const mlx_stream s = r.stream;
  // The query heads of one KV head become rows of one product: K is not repeated.
  const int group_rows = r.heads / r.kv_heads * r.length;
  const Array scaled = call(mlx_multiply, upcast(r.queries, s), number(r.scale), s);
  const Array queries = reshape(scaled, {r.batch, r.kv_heads, group_rows, r.head_size}, s);
  const Array keys = call(mlx_swapaxes, dense(r.keys, s), -1, -2, s);
  Array logits =
      reshape(call(mlx_matmul, queries, keys, s), {r.batch, r.heads, r.length, r.rows}, s);
  const Array masked = number(-INFINITY);
  if (r.causal) {
    const Array last = range(r.rows - r.length, r.rows, MLX_INT32, s);
    const Array seen =
        call(mlx_less_equal, range(0, r.rows, MLX_INT32, s), reshape(last, {r.length, 1}, s), s);
    return call(mlx_where, seen, logits, masked, s);
  }
  if (r.has_bool_mask()) {
    return call(mlx_where, r.mask, logits, masked, s);
  }
  if (r.has_additive_mask()) {
    const Array bias = upcast(r.mask, s);
    // NaN compares false: it is not masked, and reaches the output of its query.
    const Array hidden = call(mlx_less_equal, bias, number(r.mask_threshold), s);
    return call(mlx_where, hidden, masked, call(mlx_add, logits, bias, s), s);
  }
  return logits;
}

Softmax softmax(const Array& scores, mlx_array sink_logits, int heads, mlx_stream s) {
  Array peak = call(mlx_max_axis, scores, -1, true, s);
  Array sinks;
  if (sink_logits.ctx != nullptr) {
    sinks = reshape(upcast(sink_logits, s), {1, heads, 1, 1}, s);
    peak = call(mlx_maximum, peak, sinks, s);
  }
  // With nothing to attend to the peak is -inf, and -inf - -inf would be NaN.
  const Array nothing = call(mlx_equal, peak, number(-INFINITY), s);
  peak = call(mlx_where, nothing, number(0), peak, s);
  Array weights = call(mlx_exp, call(mlx_subtract, scores, peak, s), s);
  Array total = call(mlx_sum_axis, weights, -1, true, s);
  if (!sinks.empty()) {
    total = call(mlx_add, total, call(mlx_exp, call(mlx_subtract, sinks, peak, s), s), s);
  }
  return {std::move(weights), std::move(total), std::move(peak)};
}

Array probe_scores(const AttentionRequest& r) {
  const mlx_stream s = r.stream;
  const Array scaled = call(mlx_multiply, upcast(r.probes, s), number(r.scale), s);
  return call(mlx_matmul, scaled, call(mlx_swapaxes, dense(r.keys, s), -1, -2, s), s);
}

AttentionResult attention(const AttentionRequest& r) {
  const mlx_stream s = r.stream;
  AttentionResult result;
  result.scores = logits(r);
  Softmax parts = softmax(result.scores, r.sinks, r.heads, s);
  if (r.sparse_v_threshold > 0) {
    const Array dropped = dropped_pairs(parts, r.sparse_v_threshold, s);
    parts.weights = call(mlx_where, dropped, number(0), parts.weights, s);
    if (r.return_skipped) {
      result.skipped = share_of(dropped, result.scores, s);
    }
  } else if (r.return_skipped) {
    const int shape[] = {r.batch, r.heads, r.length};
    result.skipped = call(mlx_zeros, shape, size_t{3}, MLX_FLOAT32, s);
  }
  const int group_rows = r.heads / r.kv_heads * r.length;
  const Array grouped = reshape(parts.weights, {r.batch, r.kv_heads, group_rows, r.rows}, s);
  const Array mixed = reshape(call(mlx_matmul, grouped, dense(r.values, s), s),
                              {r.batch, r.heads, r.length, r.value_size}, s);
  const Array out = call(mlx_where, call(mlx_equal, parts.total, number(0), s), number(0),
                         call(mlx_divide, mixed, parts.total, s), s);
  result.out = call(mlx_astype, out, mlx_array_dtype(r.queries), s);
  if (r.return_lse) {
    const Array lse = call(mlx_add, parts.peak, call(mlx_log, parts.total, s), s);
    result.lse = call(mlx_squeeze_axis, lse, -1, s);
  }
  if (r.probes.ctx != nullptr) {
    result.probe_scores = probe_scores(r);
  }
  return result;
}

}  // namespace mlx_h2o_c::composed

namespace mlx_h2o_c {

const Backend composed_backend = {
    "composed",
    [] { return std::string(); },
    [](const AttentionRequest& /* request */) { return std::string(); },
    composed::attention,
    nullptr,  // attention, then the best moving average
    composed::prefill_scores,
    composed::accumulate_scores,
    composed::keep_indices,
    composed::evict_indices,
    composed::key_diversity,
    composed::replace_worst,
    composed::quantize_append,
};

}  // namespace mlx_h2o_c
