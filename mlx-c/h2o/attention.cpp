// The public functions of attention.
#include "mlx_h2o/c/attention.h"

#include "backend.h"
#include "boundary.h"
#include "composed.h"
#include "validate.h"

using namespace mlx_h2o_c;

namespace {

// The results that the caller gave a place for.
void attend(AttentionRequest request, mlx_array* out, mlx_array* scores, mlx_array* lse,
            mlx_array* skipped) {
  request.return_scores = scores != nullptr;
  request.return_lse = lse != nullptr;
  request.return_skipped = skipped != nullptr;
  const AttentionResult result = backend_for_attention(request).attention(request);
  give(out, result.out);
  give(scores, result.scores);
  give(lse, result.lse);
  give(skipped, result.skipped);
}

bool is_mass(const Arguments& given, const char* kind) {
  const std::string name = kind == nullptr ? "" : kind;
  given.one_of("kind", name);
  return name == "mass";
}

}  // namespace

int mlx_h2o_scaled_dot_product_attention_with_scores(mlx_array* out, mlx_array* scores,
                                                     mlx_array* lse, mlx_array queries,
                                                     mlx_array keys, mlx_array values, float scale,
                                                     const char* mask_mode, mlx_array mask_arr,
                                                     mlx_array sinks, mlx_array row_bias,
                                                     mlx_stream s) {
  return operation("scaled_dot_product_attention_with_scores", {{"out", out}}, [&](const char* op) {
    attend(attention_request(op, queries, parts_of(keys, {}, {}), parts_of(values, {}, {}), nullptr,
                             {scale}, {mask_mode, mask_arr, sinks, row_bias, s}),
           out, scores, lse, nullptr);
  });
}

int mlx_h2o_scaled_dot_product_attention_quantized_with_scores(
    mlx_array* out, mlx_array* scores, mlx_array* lse, mlx_array* skipped, mlx_array queries,
    mlx_array k_w, mlx_array k_s, mlx_array k_b, mlx_array v_w, mlx_array v_s, mlx_array v_b,
    float scale, int bits, int group_size, mlx_optional_int v_bits, const char* mask_mode,
    mlx_array mask_arr, mlx_array sinks, mlx_array row_bias, float sparse_v_threshold,
    mlx_stream s) {
  constexpr auto name = "scaled_dot_product_attention_quantized_with_scores";
  return operation(name, {{"out", out}}, [&](const char* op) {
    const Packing packing = {bits, group_size, v_bits};
    std::vector<Array> keys = parts_of(k_w, k_s, k_b), values = parts_of(v_w, v_s, v_b);
    AttentionRequest request = attention_request(op, queries, std::move(keys), std::move(values),
                                                 &packing, {scale, false, sparse_v_threshold},
                                                 {mask_mode, mask_arr, sinks, row_bias, s});
    expect(request.values.packed(), op,
           "keys and values are 1 and 1 arrays, expected both packed, or one array of keys beside "
           "codes.");
    attend(std::move(request), out, scores, lse, skipped);
  });
}

int mlx_h2o_attention_and_accumulate(mlx_array* out, mlx_array* new_importance, mlx_array queries,
                                     mlx_vector_array keys, mlx_vector_array values,
                                     mlx_array importance, float scale, const char* kind,
                                     double decay, const char* mask_mode, mlx_array mask_arr,
                                     mlx_array sinks, mlx_array row_bias, int bits, int group_size,
                                     mlx_optional_int v_bits, float sparse_v_threshold,
                                     mlx_stream s) {
  const Places places = {{"out", out}, {"new_importance", new_importance}};
  return operation("attention_and_accumulate", places, [&](const char* op) {
    const Packing packing = {bits, group_size, v_bits};
    std::vector<Array> k = parts_of(op, "keys", keys), v = parts_of(op, "values", values);
    AttentionRequest attention = attention_request(
        op, queries, std::move(k), std::move(v), &packing, {scale, false, sparse_v_threshold},
        {mask_mode, mask_arr, sinks, row_bias, s}, importance);
    expect(attention.packed() || sparse_v_threshold == 0, op, "sparse_v_threshold is ",
           sparse_v_threshold, ", expected 0 with dense rows.");
    const Arguments given(op);
    given.number("decay", decay);
    const bool mass = is_mass(given, kind);
    attention.return_lse = mass;
    attention.return_scores = true;
    const AttentionAccumulated result =
        attend_and_accumulate({std::move(attention), importance, mass, decay});
    give(out, result.out);
    give(new_importance, result.importance);
  });
}

int mlx_h2o_prefill_scores(mlx_array* res, mlx_array queries, mlx_array keys, float scale,
                           const char* mask_mode, mlx_array mask_arr, mlx_array sinks,
                           mlx_array row_bias, const char* kind, mlx_array importance, double decay,
                           int counted_queries, mlx_stream s) {
  return operation("prefill_scores", {{"res", res}}, [&](const char* op) {
    AttentionRequest chunk =
        attention_request(op, queries, parts_of(keys, {}, {}), {}, nullptr, {scale},
                          {mask_mode, mask_arr, sinks, row_bias, s}, importance);
    const Arguments given(op);
    const bool mass = is_mass(given, kind);
    given.number("decay", decay);
    given.integer("queries", counted_queries);
    expect(!mass || importance.ctx == nullptr, op,
           "importance is given with kind 'mass', expected it with 'ema'.");
    // A bottom-right causal mask also fits the last queries alone.
    const int first = mass ? 0 : std::max(0, chunk.length - counted_queries);
    chunk = composed::part_of(chunk, {first, chunk.length}, {0, chunk.rows});
    give(res, serve(op, &Backend::prefill_scores,
                    AccumulatingRequest{std::move(chunk), importance, mass, decay}));
  });
}
