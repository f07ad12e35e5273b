// The definition of attention in plain MLX operations. Inputs are upcast, logits and softmax are
// float32, and the output is rounded once.
#include <cfloat>
#include <cmath>

#include "backend.h"
#include "codes.h"
#include "composed.h"

namespace mlx_h2o_c::composed {

namespace {

std::string available() { return ""; }
std::string takes_all(const AttentionRequest& /* request */) { return ""; }

// The queries in the basis of the keys.
Value scaled_queries(const AttentionRequest& r) {
  const Value scaled = Value(mlx_array(r.queries), r.stream).as(MLX_FLOAT32) * number(r.scale);
  return r.keys.codes() ? rotated(scaled, Side::keys) : Value(mlx_array(scaled), r.stream);
}

// The logits, those of masked pairs -inf.
Value masked_pairs(const AttentionRequest& r, Value logits) {
  const mlx_stream s = r.stream;
  const Array masked = number(-INFINITY);
  if (r.causal) {
    const Value last(range(r.rows - r.length, r.rows, MLX_INT32, s), s);
    const Value seen =
        Value(range(0, r.rows, MLX_INT32, s), s).then(mlx_less_equal, last.reshaped({r.length, 1}));
    return seen.where(logits, masked);
  }
  if (r.mask.empty()) return logits;
  const Value mask(mlx_array(r.mask), s);
  if (dtype_of(r.mask) == MLX_BOOL) return mask.where(logits, masked);
  const Value bias = mask.as(MLX_FLOAT32);
  // NaN compares false: it is not masked, and reaches the output of its query.
  const Value hidden = bias.then(mlx_less_equal, number(r.mask_threshold));
  return hidden.where(masked, logits + bias);
}

}  // namespace

Value dense(const Rows& rows, mlx_stream s) {
  const auto part = [&](int i) { return Value(mlx_array(rows.parts[i]), s); };
  if (!rows.packed()) return part(0).as(MLX_FLOAT32);
  if (rows.codes()) {  // in their own basis; codes lie in the words as those of mlx_quantize do
    Shape shape = shape_of(rows.parts[0]);
    shape[3] = rows.size / 32;
    const Array ones = call(mlx_ones, shape.data(), shape.size(), MLX_FLOAT32, s);
    const Value codes =
        part(0).then(mlx_dequantize, ones, zeros(shape, s), some(32), some(rows.bits), "affine",
                     mlx_array{}, mlx_optional_dtype{MLX_FLOAT32, false});
    return Value(levels_of(rows.size, rows.bits), s).then(mlx_take, codes.as(MLX_UINT32)) * part(1);
  }
  return part(0).then(mlx_dequantize, part(1).as(MLX_FLOAT32), part(2).as(MLX_FLOAT32),
                      some(rows.group_size), some(rows.bits), "affine", mlx_array{},
                      mlx_optional_dtype{MLX_FLOAT32, false});
}

Value logits(const AttentionRequest& r) {
  const mlx_stream s = r.stream;
  // The query heads of one KV head become rows of one product: K is not repeated.
  const int group_rows = r.heads / r.kv_heads * r.length;
  const Value queries = scaled_queries(r).reshaped({r.batch, r.kv_heads, group_rows, r.head_size});
  Value logits = queries.then(mlx_matmul, dense(r.keys, s).then(mlx_swapaxes, -1, -2));
  const auto of_heads = [&](const Value& v) {
    return v.reshaped({r.batch, r.heads, r.length, r.rows});
  };
  if (r.row_bias.ctx == nullptr) return masked_pairs(r, of_heads(logits));
  const Value own = Value(r.row_bias, s).reshaped({r.batch, r.kv_heads, 1, r.rows});
  logits = masked_pairs(r, of_heads(logits + own));
  // Last: a row that its bias masks meets no NaN of the mask.
  const Value hidden = own.then(mlx_less_equal, number(-FLT_MAX));
  logits = logits.reshaped({r.batch, r.kv_heads, group_rows, r.rows});
  return of_heads(hidden.where(number(-INFINITY), logits));
}

Softmax softmax(const Value& scores, mlx_array sink_logits, int heads, mlx_stream s) {
  Value peak = scores.then(mlx_max_axis, -1, true);
  Value sinks(Array(), s);
  if (sink_logits.ctx != nullptr) {
    sinks = Value(sink_logits, s).as(MLX_FLOAT32).reshaped({1, heads, 1, 1});
    peak = peak.at_least(sinks);
  }
  // With nothing to attend to the peak is -inf, and -inf - -inf would be NaN.
  const Value nothing = peak.then(mlx_equal, number(-INFINITY));
  peak = nothing.where(number(0), peak);
  Value weights = (scores - peak).then(mlx_exp);
  Value total = weights.then(mlx_sum_axis, -1, true);
  if (!sinks.empty()) total = total + (sinks - peak).then(mlx_exp);
  return {std::move(weights), std::move(total), std::move(peak)};
}

AttentionResult attention(const AttentionRequest& r) {
  const mlx_stream s = r.stream;
  AttentionResult result;
  Value scores = logits(r);
  Softmax parts = softmax(scores, r.sinks, r.heads, s);
  if (r.return_skipped) result.skipped = zeros({r.batch, r.heads, r.length}, s);
  if (r.sparse_v_threshold > 0) {
    // The pairs whose weight is below the threshold. NaN compares false, and stays.
    const Value dropped = parts.weights.then(mlx_less, parts.total * number(r.sparse_v_threshold));
    parts.weights = dropped.where(number(0), parts.weights);
    if (r.return_skipped) {
      // The share of the N rows that a query drops though it sees them: [B, Hq, Lq].
      const Value seen = scores.then(mlx_not_equal, number(-INFINITY));
      result.skipped =
          dropped.then(mlx_logical_and, seen).as(MLX_FLOAT32).then(mlx_mean_axis, -1, false);
    }
  }
  const int group_rows = r.heads / r.kv_heads * r.length;
  const Value mixed = parts.weights.reshaped({r.batch, r.kv_heads, group_rows, r.rows})
                          .then(mlx_matmul, dense(r.values, s))
                          .reshaped({r.batch, r.heads, r.length, r.value_size});
  const Value nothing = parts.total.then(mlx_equal, number(0));
  Value out = nothing.where(number(0), mixed / parts.total);
  if (r.values.codes()) out = restored(out, Side::values);
  result.out = out.as(dtype_of(r.queries));
  if (r.return_lse) {
    result.lse = (parts.peak + parts.total.then(mlx_log)).then(mlx_squeeze_axis, -1);
  }
  result.scores = std::move(scores);
  return result;
}

// Average: attention, then the best back end's.
const Backend backend = {"composed",   available,     takes_all,      attention,
                         nullptr,      add_mass,      prefill_scores, accumulate_scores,
                         keep_indices, key_diversity, fold,           quantize_append,
                         encode_rows,  decode_rows};

}  // namespace mlx_h2o_c::composed
