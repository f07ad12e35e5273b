// The public functions on the rows of a cache, and of their selection.
#include "mlx_h2o/c/rows.h"

#include "arrays.h"
#include "boundary.h"
#include "mlx_h2o/c/selection.h"
#include "operations.h"
#include "validate.h"

using namespace mlx_h2o_c;

extern "C" {

int mlx_h2o_keep_indices(mlx_array* res, const mlx_array scores, const mlx_array positions,
                         int keep, int sink_size, const mlx_array recent_start,
                         const mlx_stream s) {
  return status([&] {
    check_place("keep_indices", "res", res);
    check(mlx_array_set(
        res, keep_indices(keep_request(scores, positions, keep, sink_size, recent_start, s))));
  });
}

int mlx_h2o_evict_indices(mlx_array* res, const mlx_array scores, const mlx_array positions,
                          int count, int sink_size, const mlx_array recent_start,
                          const mlx_stream s) {
  return status([&] {
    check_place("evict_indices", "res", res);
    check(mlx_array_set(
        res, evict_indices(evict_request(scores, positions, count, sink_size, recent_start, s))));
  });
}

int mlx_h2o_accumulate_scores(mlx_array* res, const mlx_array importance, const mlx_array scores,
                              double decay, bool masked, const mlx_stream s) {
  return status([&] {
    check_place("accumulate_scores", "res", res);
    check(mlx_array_set(
        res, accumulate_scores(accumulate_request(importance, scores, decay, masked, s))));
  });
}

int mlx_h2o_attention_and_accumulate(mlx_array* out, mlx_array* new_importance,
                                     const mlx_array queries, const mlx_vector_array keys,
                                     const mlx_vector_array values, const mlx_array importance,
                                     float scale, double decay, const char* mask_mode,
                                     const mlx_array mask_arr, const mlx_array sinks, int bits,
                                     int group_size, mlx_optional_int v_bits,
                                     float sparse_v_threshold, const mlx_stream s) {
  return status([&] {
    const char* op = "attention_and_accumulate";
    check_place(op, "out", out);
    check_place(op, "new_importance", new_importance);
    const AttentionAccumulated result = attention_and_accumulate(attention_accumulate_request(
        any_attention_request(op, queries, keys, values, {bits, group_size, v_bits},
                              sparse_v_threshold, {scale, mask_mode, mask_arr, sinks, s}),
        importance, decay));
    check(mlx_array_set(out, result.out));
    check(mlx_array_set(new_importance, result.importance));
  });
}

int mlx_h2o_key_diversity(mlx_array* res, const mlx_array keys, const mlx_stream s) {
  return status([&] {
    check_place("key_diversity", "res", res);
    check(mlx_array_set(res, key_diversity(key_diversity_request(keys, s))));
  });
}

int mlx_h2o_replace_worst(mlx_vector_array* new_keys, mlx_vector_array* new_values,
                          mlx_array* new_importance, mlx_array* new_positions,
                          const mlx_vector_array keys, const mlx_vector_array values,
                          const mlx_array importance, const mlx_array positions,
                          const mlx_array key, const mlx_array value, const mlx_array position,
                          int sink_size, const mlx_array recent_start, const char* ranked_by,
                          const mlx_array ranks, int bits, int group_size, mlx_optional_int v_bits,
                          const mlx_stream s) {
  return status([&] {
    const char* op = "replace_worst";
    check_place(op, "new_keys", new_keys);
    check_place(op, "new_values", new_values);
    check_place(op, "new_importance", new_importance);
    check_place(op, "new_positions", new_positions);
    const ReplaceArguments arguments = {importance, positions,    key,       value, position,
                                        sink_size,  recent_start, ranked_by, ranks, s};
    const Replaced result =
        replace_worst(replace_request(keys, values, {bits, group_size, v_bits}, arguments));
    const ArrayVector k = vector_of(result.keys), v = vector_of(result.values);
    check(mlx_vector_array_set(new_keys, k));
    check(mlx_vector_array_set(new_values, v));
    check(mlx_array_set(new_importance, result.importance));
    check(mlx_array_set(new_positions, result.positions));
  });
}

int mlx_h2o_quantize_append(mlx_vector_array* new_keys, mlx_vector_array* new_values,
                            const mlx_vector_array keys, const mlx_vector_array values,
                            const mlx_array key_rows, const mlx_array value_rows,
                            const mlx_array slots, int bits, int group_size,
                            mlx_optional_int v_bits, const mlx_stream s) {
  return status([&] {
    check_place("quantize_append", "new_keys", new_keys);
    check_place("quantize_append", "new_values", new_values);
    const Appended result = quantize_append(
        append_request(keys, values, key_rows, value_rows, slots, {bits, group_size, v_bits}, s));
    const ArrayVector k = vector_of(result.keys), v = vector_of(result.values);
    check(mlx_vector_array_set(new_keys, k));
    check(mlx_vector_array_set(new_values, v));
  });
}

}  // extern "C"
