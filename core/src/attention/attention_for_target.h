// What the sweeps of attention need besides the vectors of their target. Included once, at the top
// of each target's source.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention/attention_phases.h"
#include "cpu/half.h"

#if defined(MLX_H2O_X86) && !defined(__clang__)
// GCC blames us for undefined lanes inside its own AVX-512 header (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace mlx_h2o::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Scratch memory of the calling thread, at least this many floats, kept for its next call.
float* thread_memory(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats) memory.resize(static_cast<size_t>(floats));
  return memory.data();
}

}  // namespace
}  // namespace mlx_h2o::kernels
