// Which rows of a cache to keep, on plain memory: no MLX in here, so that tests can run it alone.
#pragma once

#include <cstdint>
#include <limits>

namespace mlx_h2o::kernels {

/// Rows at 0 <= position < sink_size, and at position >= recent_start, are protected.
struct Zones {
  int32_t sink_size = 0;
  int32_t recent_start = std::numeric_limits<int32_t>::max();  // none
};

/// One call: `rows` rows per (batch, head). Strides count elements.
struct SelectionArguments {
  int batch, heads, rows;
  const float* scores;
  int64_t score_strides[3];  // batch, head, row
  const int32_t* positions;  // below 0: padding
  int64_t position_strides[3];
  int sink_size;                          // rows at 0 <= position < sink_size are protected
  const int32_t* recent_start = nullptr;  // [batch]: so are rows from here on; null: no window
  int64_t recent_start_stride = 0;

  Zones zones_of(int64_t sequence) const {
    if (recent_start == nullptr) return {sink_size};
    return {sink_size, recent_start[sequence * recent_start_stride]};
  }
};

/// result[batch, heads, keep]: the slots of the best `keep` rows, ascending.
///
/// Best first: protected rows; then the higher score; then NaN; then padding. In a tie the lower
/// position is better, for padding the lower slot. O(rows + keep log keep) per head.
void keep_indices(const SelectionArguments& arguments, int keep, uint32_t* result);

}  // namespace mlx_h2o::kernels
