// How much each key differs from the average key, on plain memory: no MLX in here.
#pragma once

#include <cstdint>

#include "attention/attention_kernel.h"

namespace mlx_h2o::kernels {

/// One call. Strides count elements; the last axis of keys has stride 1.
struct KeyDiversityArguments {
  int batch, heads, rows, width;
  ElementType type;
  const void* keys;  // [batch, heads, rows, width]
  int64_t key_strides[3];
  float* result;  // [batch, heads, rows], contiguous
};

/// result: minus the cosine of each key with the mean of the normalised keys of its head, in
/// float32; a key of zeros gets 0. Reads the keys twice. The threads of thread_pool.h share the
/// heads.
void key_diversity(const KeyDiversityArguments& arguments, SimdTarget target);

}  // namespace mlx_h2o::kernels
