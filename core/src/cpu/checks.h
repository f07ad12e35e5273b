// Checks of arguments that both operations share, with one wording for every language.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#include <mlx/array.h>
#include <mlx/stream.h>
#include <mlx/utils.h>

namespace mlx_h2o {

/// Throws std::invalid_argument with the text "[operation] part part ...".
template <typename... Parts>
[[noreturn]] void fail(const char* operation, const Parts&... parts) {
  std::ostringstream text;
  text << '[' << operation << "] ";
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

/// A shape as Python writes it: (1, 2) or (3,).
std::string to_text(const mlx::core::Shape& shape);

/// A dtype as Python writes it, without the module.
std::string to_text(mlx::core::Dtype dtype);

bool is_float(mlx::core::Dtype dtype);

/// "found 3 dimensions, expected 4 [B, Hq, Lq, D]" unless the array has that many.
void check_dimensions(const char* operation, const char* name, const mlx::core::array& array,
                      int expected, const char* layout);

/// Refuses arrays with a size of 0.
void check_not_empty(const char* operation, const char* name, const mlx::core::array& array,
                     const char* layout);

/// Refuses what is not int32 [] or [B], one number for all sequences or one each.
void check_per_sequence(const char* operation, const char* name, const mlx::core::array& array,
                        int batch);

/// How far apart the numbers of two sequences lie.
inline int64_t stride_of_sequences(const mlx::core::array& array) {
  return array.size() == 1 ? 0 : array.strides(0);
}

/// The stream to run on; refuses one that is not of the CPU.
mlx::core::Stream cpu_stream(const char* operation, mlx::core::StreamOrDevice s);

}  // namespace mlx_h2o
