// Rows as codes of rotated directions: their levels, signs and rotations as arrays.
#pragma once

#include "request.h"

namespace mlx_h2o_c {

// Whether rows of this size can be stored as codes.
bool codes_fit(int size);
// float32 [2 ^ bits], for rows of this size. Keys and values share the levels.
Array levels_of(int size, int bits);
// The seed of the signs of keys or values.
uint32_t seed_of(Side side);
// Rotates vectors [..., D] into the basis of the codes, float32; and back.
Value rotated(const Value& vectors, Side side);
Value restored(const Value& vectors, Side side);
// +1 and -1, float32 [size].
Array signs_of(int size, Side side);

}  // namespace mlx_h2o_c
