// The packaged Metal kernels, launched through mlx-c's own kernel functions.
#pragma once

#include <array>
#include <map>
#include <set>
#include <string>
#include <variant>

#include "kernel_text.h"
#include "request.h"

namespace mlx_h2o_c::metal {

inline constexpr int lanes = 32;         // threads of a simdgroup
inline constexpr int longest_query = 8;  // of the kernels

using Flags = std::set<std::string>;
using Outputs = std::map<std::string, Array>;

using TemplateArgument = std::variant<int, bool, mlx_dtype>;
using Size = std::array<int, 3>;

struct Output {
  Shape shape;
  mlx_dtype dtype;
};

// Arrays, arguments and outputs by name; a kernel uses those that its text asks for.
struct Names {
  std::map<std::string, mlx_array> buffers;
  std::map<std::string, TemplateArgument> arguments;
  std::map<std::string, Output> outputs;
};

// Runs the kernel that `text` makes with these flags; returns the outputs by name.
Outputs launch(const mlx_h2o_kernel_text& text, const Flags& flags, const Names& names, Size grid,
               Size threadgroup, mlx_stream stream);

// An array [n] of these values.
template <class T>
Array vector(const std::vector<T>& values, mlx_dtype dtype) {
  const int count = static_cast<int>(values.size());
  return Array(mlx_array_new_data(values.data(), &count, 1, dtype));
}
// Rounds each value once.
inline Array floats(const std::vector<double>& values) {
  return vector(std::vector<float>(values.begin(), values.end()), MLX_FLOAT32);
}
inline Array integers(const std::vector<int32_t>& values) { return vector(values, MLX_INT32); }

// Whether MLX's own attention can serve the request: a chunk, and only its output.
bool mlx_serves(const AttentionRequest& request);
AttentionResult mlx_attention(const AttentionRequest& request);

Array add_mass(const AccumulatingRequest& request, mlx_array scores, mlx_array lse);
Array keep_indices(const RetentionRequest& request);
Written quantize_append(const AppendRequest& request);
std::vector<Array> encode_rows(const EncodeRequest& request);

}  // namespace mlx_h2o_c::metal
