// Requests that MLX's own attention serves on a GPU.
#include "composed.h"
#include "metal.h"
#include "validate.h"

namespace mlx_h2o_c::metal {

bool mlx_serves(const AttentionRequest& r) {
  bool more = r.return_scores || r.return_lse || r.return_skipped || r.has_codes();
  r.each([&](const char*, float value) { more |= value != 0; });
  return r.length > longest_query && !more && (r.mask.empty() || dtype_of(r.mask) == MLX_BOOL);
}

AttentionResult mlx_attention(const AttentionRequest& r) {
  const mlx_stream s = r.stream;
  const mlx_dtype dtype = dtype_of(r.queries);
  AttentionRequest all = composed::unpacked(r, dtype);
  const Array sinks = r.sinks.ctx == nullptr ? Array() : call(mlx_astype, r.sinks, dtype, s);
  const auto attend = [&](const AttentionRequest& part, const char* mode, const Array& mask) {
    return call(mlx_fast_scaled_dot_product_attention, part.queries, part.keys.parts[0],
                part.values.parts[0], r.scale, mode, mask, sinks, s);
  };
  if (r.mask.empty() && r.row_bias.empty()) return {attend(all, r.causal ? "causal" : "", Array())};
  // Below every logit, but finite even after a kernel multiplies it by log2(e) in float32: a query
  // that sees nothing gives a mean, never NaN.
  const Value lowest = Value(number(mask_threshold(dtype)), s).as(dtype);
  const Value bias(r.row_bias.empty() ? zeros({1, r.kv_heads, r.rows}, s) : copied(r.row_bias), s);
  all.row_bias = bias.as(dtype).at_least(lowest).then(mlx_repeat_axis, r.heads / r.kv_heads, 1);
  return {composed::in_blocks(all, [&](const AttentionRequest& part) {
    Value added = Value(mlx_array(part.row_bias), s).then(mlx_expand_dims, 2);
    if (!part.mask.empty()) added = Value(mlx_array(part.mask), s).where(added, lowest);
    return attend(part, "array", added);
  })};
}

}  // namespace mlx_h2o_c::metal
