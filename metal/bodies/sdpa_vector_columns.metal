  // Ends sdpa_vector.metal: sums over all simdgroups, and writes the outputs.
#if values
  // Through threadgroup memory, one element of every lane at a time: a simdgroup then
  // sums a column.  A row of 33 avoids bank conflicts.  Unrolled, because indexing the
  // sums of a wide row would move them from registers to memory.
  H2O_UNROLL
  for (int j = 0; j < VALUE_PART; j++) {
    tile[group * (LANES + 1) + lane] = sums[j];
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int column = group; column < LANES; column += NS) {
#if sparse
      const float column_part = has_part ? tile[lane * (LANES + 1) + column] : 0.0f;
#else
      const float column_part = has_part ? tile[lane * (LANES + 1) + column] * merged.share : 0.0f;
#endif
      const float sum = metal::simd_sum(column_part);
      if (lane == 0) {
#if blocks
        partial_sums[(row * blocks + block) * V + column * VALUE_PART + j] = sum;
#else
        const float mean = h2o_softmax_mean(sum, merged.total);
        out[row * V + column * VALUE_PART + j] = static_cast<T>(mean);
#endif
      }
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
#if skipped
#if sparse
  // The counts were written before the barriers above.
  const float skipped_rows = metal::simd_sum(has_part ? counts[lane] : 0.0f);
  if (group == 0 && lane == 0) {
#if blocks
    partial_skipped[row * blocks + block] = skipped_rows / float(key_count);
#else
    skipped[row] = skipped_rows / float(key_count);
#endif
  }
#endif
#endif
#endif
#if blocks
#if keys
  if (group == 0 && lane == 0) {
    partial_maxima[row * blocks + block] = merged.maximum;
    partial_totals[row * blocks + block] = merged.total;
  }
#endif
#else
#if lse
  if (group == 0 && lane == 0) {
    lse[row] = h2o_softmax_lse(merged.maximum, merged.total);
  }
#endif
#endif
