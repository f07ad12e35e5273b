// One launch of a packaged Metal kernel, through mlx-c's own kernel functions.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "kernel_text.h"
#include "request.h"

namespace mlx_h2o_c::metal {

inline constexpr int lanes = 32;  // threads of a simdgroup
inline constexpr int widest_head = 576;

using Flags = std::set<std::string>;

struct TemplateArgument {
  enum Kind { number, boolean, type } kind;
  int value;
};

inline TemplateArgument number(int value) { return {TemplateArgument::number, value}; }
inline TemplateArgument boolean(bool value) { return {TemplateArgument::boolean, value}; }
inline TemplateArgument type(mlx_array of) { return {TemplateArgument::type, mlx_array_dtype(of)}; }

struct Output {
  std::vector<int> shape;
  mlx_dtype dtype;
};

struct Size {
  int x;
  int y;
  int z;
};

// Everything by name, of which a kernel takes what its text asks for.
struct Names {
  std::map<std::string, mlx_array> buffers;
  std::map<std::string, TemplateArgument> arguments;
  std::map<std::string, Output> outputs;
};

// Runs the kernel that `text` is with these flags; the outputs by name.
std::map<std::string, Array> launch(const mlx_h2o_kernel_text& text, const Flags& flags,
                                    const Names& names, Size grid, Size threadgroup,
                                    mlx_stream stream);

// The flags that a request of attention turns on.
Flags flags_of(const AttentionRequest& request);

Array floats(const std::vector<float>& values);

}  // namespace mlx_h2o_c::metal
