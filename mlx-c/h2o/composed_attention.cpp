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

// The logits, -inf for masked pairs.
Value masked_pairs(const AttentionRequest& r, Value logits) {
  if (r.mask.empty() && !r.causal) return logits;
  const mlx_stream s = r.stream;
  const Array masked = number(-INFINITY);
  const Value mask = r.mask.empty() ? causal_mask(r) : Value(mlx_array(r.mask), s);
  if (dtype_of(mask) == MLX_BOOL) return mask.where(logits, masked);
  const Value bias = mask.as(MLX_FLOAT32);
  // NaN compares false, so it is not masked, and makes the output of its query NaN.
  const Value hidden = bias.then(mlx_less_equal, number(r.mask_threshold));
  return hidden.where(masked, logits + bias);
}

// Shaped to broadcast with [B, Hq, L].
Value sinks_of(mlx_array sinks, mlx_stream s) {
  return Value(sinks, s).as(MLX_FLOAT32).reshaped({-1, 1});
}

// Replaces +inf by NaN, which makes the softmax NaN, as in MLX's own attention.
Value poison(const Value& logits) {
  return logits.then(mlx_equal, number(INFINITY)).where(number(NAN), logits);
}

}  // namespace

Value causal_mask(const AttentionRequest& r) {
  const mlx_stream s = r.stream;
  const Value last(range(r.rows - r.length, r.rows, MLX_INT32, s), s);
  const Value keys(range(0, r.rows, MLX_INT32, s), s);
  return keys.then(mlx_less_equal, last.reshaped({r.length, 1}));
}

Value dense(const Rows& rows, mlx_stream s, mlx_dtype dtype) {
  const auto part = [&](int i) { return Value(mlx_array(rows.parts[i]), s); };
  if (!rows.packed()) return part(0).as(dtype);
  if (rows.codes()) {  // in the basis of the codes, which are packed as mlx_quantize packs
    Shape shape = shape_of(rows.parts[0]);
    shape[3] = rows.size / 32;
    const Array ones = call(mlx_ones, shape.data(), shape.size(), MLX_FLOAT32, s);
    const Value codes =
        part(0).then(mlx_dequantize, ones, zeros(shape, s), some(32), some(rows.bits), "affine",
                     mlx_array{}, mlx_optional_dtype{MLX_FLOAT32, false});
    return Value(levels_of(rows.size, rows.bits), s).then(mlx_take, codes.as(MLX_UINT32)) * part(1);
  }
  return part(0).then(mlx_dequantize, part(1).as(dtype), part(2).as(dtype), some(rows.group_size),
                      some(rows.bits), "affine", mlx_array{},
                      mlx_optional_dtype{MLX_FLOAT32, false});
}

Value logits(const AttentionRequest& r) {
  const mlx_stream s = r.stream;
  // The query heads of a KV head become rows of one product, so that K is not repeated.
  Value queries = Value(mlx_array(r.queries), s).as(MLX_FLOAT32) * number(r.scale);
  if (r.keys.codes()) queries = rotated(queries, Side::keys);
  queries = queries.reshaped({r.batch, r.kv_heads, -1, r.head_size});
  Value logits = queries.then(mlx_matmul, dense(r.keys, s).then(mlx_swapaxes, -1, -2));
  const auto of_heads = [&](const Value& v) {
    return v.reshaped({r.batch, r.heads, r.length, r.rows});
  };
  if (r.row_bias.empty()) return masked_pairs(r, of_heads(logits));
  const Value own = Value(mlx_array(r.row_bias), s).reshaped({r.batch, r.kv_heads, 1, r.rows});
  logits = masked_pairs(r, of_heads(logits + own));
  // Last, so that a row masked by its bias is masked even where the mask is NaN.
  const Value hidden = own.then(mlx_less_equal, number(-FLT_MAX));
  logits = logits.reshaped({r.batch, r.kv_heads, -1, r.rows});
  return of_heads(hidden.where(number(-INFINITY), logits));
}

Value weights(const Value& scores, mlx_array sinks) {
  const mlx_stream s = scores.stream();
  // Up to here, the weights of a query that sees nothing are NaN.
  const Value nothing = scores.then(mlx_max_axis, -1, true).then(mlx_equal, number(-INFINITY));
  Value found = nothing.where(number(0), scores.then(mlx_softmax_axis, -1, false));
  if (sinks.ctx == nullptr) return found;
  const Value logits = poison(sinks_of(sinks, s)).then(mlx_expand_dims, -1);
  const Value lse = scores.then(mlx_logsumexp_axis, -1, true).at_least(number(-FLT_MAX));
  return found * (lse - logits).then(mlx_sigmoid);
}

static AttentionResult attend(const AttentionRequest& r) {
  const mlx_stream s = r.stream;
  AttentionResult result;
  Value scores = logits(r);
  Value shares = weights(scores, r.sinks);
  if (r.return_skipped) result.skipped = zeros({r.batch, r.heads, r.length}, s);
  if (r.sparse_v_threshold > 0) {
    const Value dropped = shares.then(mlx_less, number(r.sparse_v_threshold));
    shares = dropped.where(number(0), shares);  // NaN compares false, and stays
    if (r.return_skipped) {
      // The share of the N rows that a query sees but drops: [B, Hq, Lq].
      const Value seen = scores.then(mlx_not_equal, number(-INFINITY));
      result.skipped =
          dropped.then(mlx_logical_and, seen).as(MLX_FLOAT32).then(mlx_mean_axis, -1, false);
    }
  }
  Value out = shares.reshaped({r.batch, r.kv_heads, -1, r.rows})
                  .then(mlx_matmul, dense(r.values, s))
                  .reshaped({r.batch, r.heads, r.length, r.value_size});
  if (r.values.codes()) out = restored(out, Side::values);
  result.out = out.as(dtype_of(r.queries));
  if (r.return_lse) {
    Value lse = scores.then(mlx_logsumexp_axis, -1, false);
    if (r.sinks.ctx != nullptr) lse = lse.then(mlx_logaddexp, sinks_of(r.sinks, s));
    result.lse = poison(lse);
  }
  result.scores = std::move(scores);
  return result;
}

AttentionResult attention(const AttentionRequest& r) {
  const bool whole = r.return_scores || r.return_lse || r.return_skipped || r.has_codes();
  if (whole) return attend(r);
  const AttentionRequest all = unpacked(r, MLX_FLOAT32);
  return {in_blocks(all, [](const AttentionRequest& part) { return attend(part).out; })};
}

// attention_and_accumulate is NULL: attention, then the average or mass of the best back end.
const Backend backend = {"composed",   available,     takes_all,      attention,
                         nullptr,      add_mass,      prefill_scores, accumulate_scores,
                         keep_indices, key_diversity, fold,           quantize_append,
                         encode_rows,  decode_rows};

}  // namespace mlx_h2o_c::composed
