// Argument checks that several operations share, with one wording for every language.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <mlx/array.h>
#include <mlx/stream.h>
#include <mlx/utils.h>

#include "cpu/arguments.h"

namespace mlx_h2o {

/// A shape as Python writes it: (1, 2) or (3,).
std::string to_text(const mlx::core::Shape& shape);

/// A dtype as Python writes it, without the module.
const char* to_text(mlx::core::Dtype dtype);

bool is_float(mlx::core::Dtype dtype);

/// Throws "found 3 dimensions, expected 4 [B, Hq, Lq, D]" unless the array has that many.
void check_dimensions(const char* operation, const char* name, const mlx::core::array& array,
                      int expected, const char* layout);

/// Throws for another shape or dtype.
void check_array(const char* operation, const char* name, const mlx::core::array& found,
                 const mlx::core::Shape& shape, mlx::core::Dtype dtype);

/// The array as the table of operations sees it.
Found found(const mlx::core::array& array);
Found found(const std::optional<mlx::core::array>& array);
/// Passes keys or values in parts.
void give_rows(Arguments& given, const std::vector<mlx::core::array>& parts);
/// The same for an optional array with room for more rows: the third axis may have `least` to
/// `most` rows. `shape` is memory for the result.
Found found_rows(const mlx::core::array& array, int least, int most, mlx::core::Shape& shape);

/// Bytes of a row of an array [B, H, C] or [B, H, C, width].
inline size_t row_bytes(const mlx::core::array& array) {
  return array.itemsize() * (array.ndim() == 4 ? static_cast<size_t>(array.shape(3)) : 1);
}

/// The stream to run on; throws if it is not a CPU stream.
mlx::core::Stream cpu_stream(const char* operation, mlx::core::StreamOrDevice s);

}  // namespace mlx_h2o
