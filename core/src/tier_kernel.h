// One new row in a cache whose newest rows are dense and whose others are packed in one or two
// tiers, on plain memory: no MLX in here.
#pragma once

#include <cstdint>

#include "accumulation_kernel.h"
#include "row_kernel.h"

namespace mlx_h2o::kernels {

/// Keys and values [heads, rows, width] of some rows of each head.
struct Tier {
  StoredRows keys, values;
  int rows = 0;
};

/// One call. The slots of a head are those of the heavy tier, of the light one, and of the newest
/// rows, in order of position. The last axis of new rows and ranks has stride 1; strides count
/// elements.
struct TierArguments {
  int batch, heads;
  Tier heavy;   // packed
  Tier light;   // packed with fewer bits; no rows: there is no such tier
  Tier newest;  // dense, at least one row
  const void* new_keys;
  const void* new_values;
  int64_t new_key_strides[2];  // batch, head
  int64_t new_value_strides[2];
  int position;
  Zones zones;
  const float* ranks;  // [batch, heads, slots]; null: the importance
  int64_t rank_strides[2];
  float* importance;               // [batch, heads, slots]
  int32_t* positions;              // [batch, heads, slots]
  float* key_sum = nullptr;        // [batch, heads, width] of the normalised keys; null: not kept
  float* inverse_norms = nullptr;  // [batch, heads, slots]
};

/// In each head the worst packed row goes, the oldest of the newest rows is packed, and the new row
/// comes behind the others, not yet scored.
///
/// The packed row takes the slot of the row that goes. Where that is in the light tier and it ranks
/// above the lightest row of the heavy tier, that one, cut down to the upper bits of its codes,
/// goes there, and it takes that one's slot. O(slots + newest * width) per head.
void replace_in_tiers(const TierArguments& arguments, SimdTarget target);

}  // namespace mlx_h2o::kernels
