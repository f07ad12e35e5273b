// From the arguments of the public functions to requests. Every check throws
// std::invalid_argument whose text begins with the operation's name.
#pragma once

#include "checks.h"
#include "request.h"

namespace mlx_h2o_c {

inline constexpr auto probes_name = "scaled_dot_product_attention_with_probes";

// What every kind of attention takes beside its rows.
struct AttentionArguments {
  float scale;
  const char* mask_mode;
  mlx_array mask;
  mlx_array sinks;
  mlx_stream stream;
};

void check_packing(const char* op, const Packing& packing);
int value_bits(const Packing& packing);
// The elements of a row; `what` is what a message calls its words.
int packed_width(const char* op, const std::string& what, mlx_array words, int bits,
                 int group_size);
// The arrays of a vector, one or three. `name` is "keys" or "values".
std::vector<Array> parts_of(const char* op, const char* name, mlx_vector_array vector);
void check_both_packed(const char* op, bool keys, bool values);
// `name` is that of one row, "key" or "value".
Rows packed_rows(const char* op, const std::string& name, mlx_array words, mlx_array scales,
                 mlx_array biases, int bits, int group_size);

void check_queries(const char* op, mlx_array queries);
AttentionRequest dense_attention_request(const char* op, mlx_array queries, mlx_array keys,
                                         mlx_array values, const AttentionArguments& arguments);
AttentionRequest packed_attention_request(const char* op, mlx_array queries, Rows keys, Rows values,
                                          float sparse_v_threshold,
                                          const AttentionArguments& arguments);
// Of rows of either kind.
AttentionRequest any_attention_request(const char* op, mlx_array queries, mlx_vector_array keys,
                                       mlx_vector_array values, const Packing& packing,
                                       float sparse_v_threshold,
                                       const AttentionArguments& arguments);
void check_probes(const AttentionRequest& request, mlx_array probes);
PrefillRequest prefill_request(const char* op, mlx_array queries, mlx_array keys, const char* kind,
                               mlx_array importance, double decay, int counted,
                               const AttentionArguments& arguments);

}  // namespace mlx_h2o_c
