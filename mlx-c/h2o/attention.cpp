// The public functions of attention.
#include "mlx_h2o/c/attention.h"

#include "backend.h"
#include "boundary.h"
#include "validate.h"

using namespace mlx_h2o_c;

namespace {

constexpr auto dense_name = "scaled_dot_product_attention_with_scores";
constexpr auto quantized_name = "scaled_dot_product_attention_quantized_with_scores";

// The results that have a place.
void attend(AttentionRequest& request, mlx_array* out, mlx_array* scores, mlx_array* lse,
            mlx_array* skipped) {
  request.return_lse = lse != nullptr;
  request.return_skipped = skipped != nullptr;
  const AttentionResult result = backend_for_attention(request).attention(request);
  give(out, result.out);
  give(scores, result.scores);
  give(lse, result.lse);
  give(skipped, result.skipped);
}

// The last `count` queries; a bottom-right causal mask fits as it is.
void keep_last(PrefillRequest& r, int count) {
  r.queries = slice(r.queries, 2, r.length - count, r.length, r.stream);
  if (!r.mask.empty()) r.mask = slice(r.mask, 2, r.length - count, r.length, r.stream);
  r.length = count;
}

}  // namespace

int mlx_h2o_scaled_dot_product_attention_with_scores(mlx_array* out, mlx_array* scores,
                                                     mlx_array* lse, mlx_array queries,
                                                     mlx_array keys, mlx_array values, float scale,
                                                     const char* mask_mode, mlx_array mask_arr,
                                                     mlx_array sinks, mlx_array row_bias,
                                                     mlx_stream s) {
  return operation(dense_name, {{"out", out}, {"scores", scores}}, [&](const char* op) {
    AttentionRequest request = dense_attention_request(
        op, queries, keys, values, {scale, mask_mode, mask_arr, sinks, s, 0, row_bias});
    attend(request, out, scores, lse, nullptr);
  });
}

int mlx_h2o_scaled_dot_product_attention_quantized_with_scores(
    mlx_array* out, mlx_array* scores, mlx_array* lse, mlx_array* skipped, mlx_array queries,
    mlx_array k_w, mlx_array k_s, mlx_array k_b, mlx_array v_w, mlx_array v_s, mlx_array v_b,
    float scale, int bits, int group_size, mlx_optional_int v_bits, const char* mask_mode,
    mlx_array mask_arr, mlx_array sinks, mlx_array row_bias, float sparse_v_threshold,
    mlx_stream s) {
  return operation(quantized_name, {{"out", out}, {"scores", scores}}, [&](const char* op) {
    check_queries(op, queries);
    AttentionRequest request = packed_attention_request(
        op, queries, {k_w, k_s, k_b}, {v_w, v_s, v_b}, {bits, group_size, v_bits},
        {scale, mask_mode, mask_arr, sinks, s, sparse_v_threshold, row_bias});
    attend(request, out, scores, lse, skipped);
  });
}

int mlx_h2o_prefill_scores(mlx_array* res, mlx_array queries, mlx_array keys, float scale,
                           const char* mask_mode, mlx_array mask_arr, mlx_array sinks,
                           mlx_array row_bias, const char* kind, mlx_array importance, double decay,
                           int counted_queries, mlx_stream s) {
  return operation("prefill_scores", {{"res", res}}, [&](const char* op) {
    check_present(op, {"queries", queries, query_layout});
    check_present(op, {"keys", keys, "[B, Hkv, N, D]"});
    const mlx_dtype of_queries = dtype_of(queries), of_keys = dtype_of(keys);
    expect(!is_float(queries) || !is_float(keys) || of_queries == of_keys, op,
           "queries and keys are ", of_queries, " and ", of_keys, ", expected the same dtype.");
    // The rules of attention hold, whose values are of no account here.
    PrefillRequest request{};
    static_cast<AttentionRequest&>(request) = dense_attention_request(
        op, queries, keys, keys, {scale, mask_mode, mask_arr, sinks, s, 0, row_bias});
    request.mass = is_mass(op, kind);
    check_decay(op, decay);
    request.decay = decay;
    expect(counted_queries >= 1, op, "queries is ", counted_queries, ", expected at least 1.");
    if (!request.mass && counted_queries < request.length) keep_last(request, counted_queries);
    request.importance = importance;
    if (importance.ctx != nullptr) {
      expect(!request.mass, op, "importance is given with kind 'mass', expected it with 'ema'.");
      expect(dtype_of(importance) == MLX_FLOAT32, op, "importance is ", dtype_of(importance),
             ", expected float32.");
      const Shape found = shape_of(importance),
                  rows = {request.batch, request.kv_heads, request.rows};
      expect(found == rows, op, "importance has shape ", found, ", expected [B, Hkv, N] = ", rows,
             ".");
    }
    give(res, serve(op, &Backend::prefill_scores, request));
  });
}
