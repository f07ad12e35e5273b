// Turns the arguments of the public functions into requests.
#pragma once

#include "checks.h"
#include "request.h"

namespace mlx_h2o_c {

// The arrays of a vector, up to three. `name` is "keys" or "values".
std::vector<Array> parts_of(const char* op, const char* name, mlx_vector_array vector);
// Words, scales and biases; the last handles may be empty.
std::vector<Array> parts_of(mlx_array rows, mlx_array scales, mlx_array biases);
// Checks parts as the next rows of the table, of size `size` ("D" or "Dv").
Rows checked_rows(Arguments& given, std::vector<Array> parts, int bits, int group_size,
                  const char* size);
// An additive mask of this dtype hides pairs at or below this value: half of the lowest finite
// value, because models mask with that value as well as with -inf.
float mask_threshold(mlx_dtype dtype);
// A request of any attention operation; those that take packed rows pass a packing.
AttentionRequest attention_request(const char* op, mlx_array queries, std::vector<Array> keys,
                                   std::vector<Array> values, const Packing* packing,
                                   const AttentionNumbers& numbers,
                                   const AttentionArguments& arguments, mlx_array importance = {});

}  // namespace mlx_h2o_c
