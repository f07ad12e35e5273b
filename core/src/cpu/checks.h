// Checks of arguments that both operations share, with one wording for every language.
#pragma once

#include <cstdint>
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
std::string to_text(mlx::core::Dtype dtype);

bool is_float(mlx::core::Dtype dtype);

/// "found 3 dimensions, expected 4 [B, Hq, Lq, D]" unless the array has that many.
void check_dimensions(const char* operation, const char* name, const mlx::core::array& array,
                      int expected, const char* layout);

/// Refuses another shape or dtype.
void check_array(const char* operation, const char* name, const mlx::core::array& found,
                 const mlx::core::Shape& shape, mlx::core::Dtype dtype);

/// As the table of operations sees it.
Found found(const mlx::core::array& array);
Found found(const std::optional<mlx::core::array>& array);
/// Keys or values in parts.
void give_rows(Arguments& given, const std::vector<mlx::core::array>& parts);
/// The same of rows of which there may be more, or none: with at least and at most so many on the
/// third axis. `shape` is its memory.
Found found_rows(const mlx::core::array& array, int least, int most, mlx::core::Shape& shape);

/// How far apart the numbers of two sequences lie.
inline int64_t stride_of_sequences(const mlx::core::array& array) {
  return array.size() == 1 ? 0 : array.strides(0);
}

/// The stream to run on; refuses one that is not of the CPU.
mlx::core::Stream cpu_stream(const char* operation, mlx::core::StreamOrDevice s);

}  // namespace mlx_h2o
