// Which rows of a cache to keep, on plain memory: no MLX in here, so that tests can drive it alone.
#pragma once

#include <cstdint>

#include "attention_kernel.h"

namespace mlx_h2o::kernels {

/// One call: `rows` rows per (batch, head). Strides count elements.
struct SelectionArguments {
  int batch, heads, rows;
  const float* scores;
  int64_t score_strides[3];  // batch, head, row
  const int32_t* positions;  // below 0: padding
  int64_t position_strides[3];
  int sink_size;                          // rows at 0 <= position < sink_size are protected
  const int32_t* recent_start = nullptr;  // [batch]: and rows at or behind it; null: no window
  int64_t recent_start_stride = 0;
  SimdTarget target = SimdTarget::scalar;

  Zones zones_of(int64_t sequence) const {
    if (recent_start == nullptr) return {sink_size};
    return {sink_size, recent_start[sequence * recent_start_stride]};
  }
};

/// result[batch, heads, keep]: the slots of the best `keep` rows, ascending.
///
/// Best first: protected rows; then the higher score; then NaN; then padding. Of equals the lower
/// position is better, of padding the lower slot. O(rows + keep log keep) per head.
void keep_indices(const SelectionArguments& arguments, int keep, uint32_t* result);

/// result[batch, heads, count]: the slots that keep_indices(rows - count) leaves out, worst first.
/// One pass without a sort where count is 1, else O(rows + count log count) per head.
void evict_indices(const SelectionArguments& arguments, int count, uint32_t* result);

}  // namespace mlx_h2o::kernels
