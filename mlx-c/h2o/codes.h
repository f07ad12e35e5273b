// Rows as codes of rotated directions: their levels and bases as arrays.
#pragma once

#include "request.h"

namespace mlx_h2o_c {

// Whether rows of so many elements can be kept so.
bool codes_fit(int size);
// float32 [2 ^ bits] of rows of so many elements. Keys and values have the same.
Array levels_of(int size, int bits);
// Where the signs of a side begin.
uint32_t seed_of(Side side);
// Vectors [..., D] in the basis of the codes, float32; and the other way.
Value rotated(const Value& vectors, Side side);
Value restored(const Value& vectors, Side side);
// +1 and -1, float32 [size].
Array signs_of(int size, Side side);

}  // namespace mlx_h2o_c
