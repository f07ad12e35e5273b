  // Second pass of decode attention: merges the blocks of the first.  A simdgroup
  // serves 32 columns of one query row; lane b takes the softmax of block b, so there
  // are at most 32 blocks.
  //   grid (B * Hq * Lq * V, 1, 1), threadgroup (32, 1, 1)
  //   T dtype of out, V its last axis
  constexpr int LANES = 32;
  constexpr int PARTS = V / LANES;
  const int lane = int(thread_index_in_simdgroup);
  const int64_t row = int64_t(threadgroup_position_in_grid.x) / PARTS;
  const int column = int(threadgroup_position_in_grid.x) % PARTS * LANES + lane;
  const int blocks = partial_maxima_shape[3];

  h2o_softmax part = h2o_softmax_empty();
  if (lane < blocks) {
    part.maximum = partial_maxima[row * blocks + lane];
    part.total = partial_totals[row * blocks + lane];
  }
  const h2o_merged merged = h2o_softmax_merge(part);
  float sum = 0.0f;
  for (int b = 0; b < blocks; b++) {
    const float share = metal::simd_shuffle(merged.share, ushort(b));
    sum += share * partial_sums[(row * blocks + b) * V + column];
  }
  out[row * V + column] = static_cast<T>(h2o_softmax_mean(sum, merged.total));
#if skipped
  const float rows_skipped =
      metal::simd_sum(lane < blocks ? partial_skipped[row * blocks + lane] : 0.0f);
  if (column == 0) {
    skipped[row] = rows_skipped;
  }
#endif
#if lse
  if (column == 0) {
    lse[row] = h2o_softmax_lse(merged.maximum, merged.total);
  }
#endif
