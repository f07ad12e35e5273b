// Helpers for the argument checks of all operations; the error texts match the Python package.
#pragma once

#include <string>

#include "../../core/src/cpu/arguments.h"
#include "arrays.h"

namespace mlx_h2o_c {

using mlx_h2o::Arguments;
using mlx_h2o::Found;

// Converts a number for a message, as Python writes it.
template <class Part>
decltype(auto) shown(const Part& part) {
  if constexpr (std::is_floating_point_v<Part>) {
    return mlx_h2o::shown(part);
  } else {
    return part;
  }
}

template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  mlx_h2o::fail(op, shown(parts)...);
}

// Throws unless `right`; the message costs nothing otherwise.
template <class... Parts>
void expect(bool right, const char* op, const Parts&... parts) {
  if (!right) fail(op, parts...);
}

// The array as the table of operations sees it; an empty handle is an absent array.
Found found(mlx_array array);

// Whether the stream's device is a GPU; an empty handle is an error.
bool runs_on_gpu(const char* op, mlx_stream stream);

}  // namespace mlx_h2o_c
