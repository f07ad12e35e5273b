// From the arguments of the public functions to requests. Every check throws
// std::invalid_argument whose text begins with the operation's name.
#pragma once

#include "request.h"

namespace mlx_h2o_c {

inline constexpr auto attention_name = "scaled_dot_product_attention_with_scores";
inline constexpr auto quantized_attention_name =
    "scaled_dot_product_attention_quantized_with_scores";
inline constexpr auto probes_name = "scaled_dot_product_attention_with_probes";
inline constexpr auto prefill_name = "prefill_scores";

// What every kind of attention takes beside its rows.
struct AttentionArguments {
  float scale;
  const char* mask_mode;
  mlx_array mask;
  mlx_array sinks;
  mlx_stream stream;
};

// The arrays of a vector, one or three. `name` is "keys" or "values".
std::vector<Array> parts_of(const char* op, const char* name, mlx_vector_array vector);
// The rows of a vector of one array, or of three, which `packing` describes.
Rows rows_of(const char* op, const char* name, mlx_vector_array vector, const Packing& packing);
Rows dense_rows(mlx_array array);
// `name` is that of one row, "key" or "value".
Rows packed_rows(const char* op, const char* name, mlx_array words, mlx_array scales,
                 mlx_array biases, int bits, int group_size);
void check_packing(const char* op, const Packing& packing);
int value_bits(const Packing& packing);

AttentionRequest dense_attention_request(const char* op, mlx_array queries, Rows keys, Rows values,
                                         const AttentionArguments& arguments);
AttentionRequest packed_attention_request(const char* op, mlx_array queries, Rows keys, Rows values,
                                          float sparse_v_threshold,
                                          const AttentionArguments& arguments);
// Of rows of either kind.
AttentionRequest any_attention_request(const char* op, mlx_array queries, mlx_vector_array keys,
                                       mlx_vector_array values, const Packing& packing,
                                       float sparse_v_threshold,
                                       const AttentionArguments& arguments);
void check_queries(const char* op, mlx_array queries);
void check_probes(const AttentionRequest& request, mlx_array probes);
PrefillRequest prefill_request(mlx_array queries, mlx_array keys, const char* kind,
                               mlx_array importance, double decay, int counted,
                               const AttentionArguments& arguments);

RetentionRequest keep_request(mlx_array scores, mlx_array positions, int keep, int sink_size,
                              mlx_array recent_start, mlx_stream stream);
RetentionRequest evict_request(mlx_array scores, mlx_array positions, int count, int sink_size,
                               mlx_array recent_start, mlx_stream stream);

AccumulateRequest accumulate_request(mlx_array importance, mlx_array scores, double decay,
                                     bool masked, mlx_stream stream);
AttentionAccumulateRequest attention_accumulate_request(AttentionRequest attention,
                                                        mlx_array importance, double decay);
KeyDiversityRequest key_diversity_request(mlx_array keys, mlx_stream stream);

// What replace_worst takes beside the rows.
struct ReplaceArguments {
  mlx_array importance;
  mlx_array positions;
  mlx_array new_keys;
  mlx_array new_values;
  mlx_array position;
  int sink_size;
  mlx_array recent_start;
  const char* ranked_by;
  mlx_array ranks;
  mlx_stream stream;
};
ReplaceRequest replace_request(mlx_vector_array keys, mlx_vector_array values,
                               const Packing& packing, const ReplaceArguments& arguments);
AppendRequest append_request(mlx_vector_array keys, mlx_vector_array values, mlx_array new_keys,
                             mlx_array new_values, mlx_array slots, const Packing& packing,
                             mlx_stream stream);

}  // namespace mlx_h2o_c
