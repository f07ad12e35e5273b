// From the arguments of the public functions to requests. Every check throws
// std::invalid_argument whose text begins with the operation's name.
#pragma once

#include <array>

#include "checks.h"
#include "request.h"

namespace mlx_h2o_c {

inline constexpr auto query_layout = "[B, Hq, Lq, D]";

void check_packing(const char* op, const Packing& packing);
// The elements of a row; `what` is what a message calls its words.
int packed_width(const char* op, const std::string& what, mlx_array words, const Packing& packing);
// The arrays of a vector, up to three. `name` is "keys" or "values".
std::vector<Array> parts_of(const char* op, const char* name, mlx_vector_array vector);
// Words, scales and biases, which may be empty handles; `name` is that of one row, "key" or
// "value".
using Parts = std::array<mlx_array, 3>;
Rows packed_rows(const char* op, const std::string& name, const Parts& parts,
                 const Packing& packing);
// The same of words and norms.
Rows coded_rows(const char* op, const std::string& name, mlx_array words, mlx_array norms,
                int bits);

void check_queries(const char* op, mlx_array queries);
AttentionRequest dense_attention_request(const char* op, mlx_array queries, mlx_array keys,
                                         mlx_array values, const AttentionArguments& arguments);
AttentionRequest packed_attention_request(const char* op, mlx_array queries, const Parts& keys,
                                          const Parts& values, const Packing& packing,
                                          const AttentionArguments& arguments);
// Of rows of either kind.
AttentionRequest any_attention_request(const char* op, mlx_array queries, mlx_vector_array keys,
                                       mlx_vector_array values, const Packing& packing,
                                       const AttentionArguments& arguments);
}  // namespace mlx_h2o_c
