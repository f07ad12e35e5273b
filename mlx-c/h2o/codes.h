// Rows as codes of rotated directions: their levels and bases as arrays.
#pragma once

#include "request.h"

namespace mlx_h2o_c {

// Whether rows of so many elements can be kept so.
bool codes_fit(int size);
// float32 [2 ^ bits]. Keys and values have the same.
Array levels_of(const Rows& rows);
// Vectors [..., D] in the basis of the codes, float32; and the other way.
enum class Side { keys, values };
Value rotated(const Value& vectors, Side side);
Value restored(const Value& vectors, Side side);

}  // namespace mlx_h2o_c
