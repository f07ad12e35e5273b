// The public functions of attention.
#include "mlx_h2o/c/attention.h"

#include "backend.h"
#include "boundary.h"
#include "validate.h"

using namespace mlx_h2o_c;

namespace {

// The results that have a place.
void attend(AttentionRequest& request, mlx_array* out, mlx_array* scores, mlx_array* lse,
            mlx_array* skipped, mlx_array* probe_scores) {
  request.return_lse = lse != nullptr;
  request.return_skipped = skipped != nullptr;
  const AttentionResult result = backend_for_attention(request).attention(request);
  give(out, result.out);
  give(scores, result.scores);
  give(lse, result.lse);
  give(skipped, result.skipped);
  give(probe_scores, result.probe_scores);
}

}  // namespace

extern "C" {

int mlx_h2o_scaled_dot_product_attention_with_scores(mlx_array* out, mlx_array* scores,
                                                     mlx_array* lse, const mlx_array queries,
                                                     const mlx_array keys, const mlx_array values,
                                                     float scale, const char* mask_mode,
                                                     const mlx_array mask_arr,
                                                     const mlx_array sinks, const mlx_stream s) {
  return status([&] {
    const char* op = "scaled_dot_product_attention_with_scores";
    check_place(op, "out", out);
    check_place(op, "scores", scores);
    AttentionRequest request =
        dense_attention_request(op, queries, keys, values, {scale, mask_mode, mask_arr, sinks, s});
    attend(request, out, scores, lse, nullptr, nullptr);
  });
}

int mlx_h2o_scaled_dot_product_attention_quantized_with_scores(
    mlx_array* out, mlx_array* scores, mlx_array* lse, mlx_array* skipped, const mlx_array queries,
    const mlx_array k_w, const mlx_array k_s, const mlx_array k_b, const mlx_array v_w,
    const mlx_array v_s, const mlx_array v_b, float scale, int bits, int group_size,
    mlx_optional_int v_bits, const char* mask_mode, const mlx_array mask_arr, const mlx_array sinks,
    float sparse_v_threshold, const mlx_stream s) {
  return status([&] {
    const char* op = "scaled_dot_product_attention_quantized_with_scores";
    check_place(op, "out", out);
    check_place(op, "scores", scores);
    check_queries(op, queries);
    const Packing packing = {bits, group_size, v_bits};
    check_packing(op, packing);
    Rows keys = packed_rows(op, "key", k_w, k_s, k_b, bits, group_size);
    Rows values = packed_rows(op, "value", v_w, v_s, v_b, value_bits(packing), group_size);
    AttentionRequest request =
        packed_attention_request(op, queries, std::move(keys), std::move(values),
                                 sparse_v_threshold, {scale, mask_mode, mask_arr, sinks, s});
    attend(request, out, scores, lse, skipped, nullptr);
  });
}

int mlx_h2o_scaled_dot_product_attention_with_probes(
    mlx_array* out, mlx_array* scores, mlx_array* lse, mlx_array* probe_scores,
    const mlx_array queries, const mlx_vector_array keys, const mlx_vector_array values,
    const mlx_array probes, float scale, int bits, int group_size, mlx_optional_int v_bits,
    const char* mask_mode, const mlx_array mask_arr, const mlx_array sinks,
    float sparse_v_threshold, const mlx_stream s) {
  return status([&] {
    const char* op = probes_name;
    check_place(op, "out", out);
    check_place(op, "scores", scores);
    check_place(op, "probe_scores", probe_scores);
    AttentionRequest request =
        any_attention_request(op, queries, keys, values, {bits, group_size, v_bits},
                              sparse_v_threshold, {scale, mask_mode, mask_arr, sinks, s});
    check_probes(request, probes);
    request.probes = probes;
    attend(request, out, scores, lse, nullptr, probe_scores);
  });
}

int mlx_h2o_prefill_scores(mlx_array* res, const mlx_array queries, const mlx_array keys,
                           float scale, const char* mask_mode, const mlx_array mask_arr,
                           const mlx_array sinks, const char* kind, const mlx_array importance,
                           double decay, int counted_queries, const mlx_stream s) {
  return status([&] {
    const char* op = "prefill_scores";
    check_place(op, "res", res);
    const PrefillRequest request =
        prefill_request(op, queries, keys, kind, importance, decay, counted_queries,
                        {scale, mask_mode, mask_arr, sinks, s});
    give(res, serve(op, &Backend::prefill_scores, request));
  });
}

}  // extern "C"
