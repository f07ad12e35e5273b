  // The rows that each head keeps: all but the `dropped` lowest in the retention order
  // (docs/python.md), as slots in ascending order.  A threadgroup of NS simdgroups
  // serves one head.  The order is a key of 64 bits in two words, distinct within a
  // head. The key of the lowest row that stays is found bit by bit, by counting the
  // rows below a candidate, so nothing is sorted.
  //   grid (B * H * NS * 32, 1, 1), threadgroup (NS * 32, 1, 1)
  //   zones = [first position after the sinks, dropped]; recent_starts = first
  //   position of the recent window of each sequence
  constexpr int LANES = 32;
  H2O_THREADGROUP(int, counts, NS);

  const int lane = int(thread_index_in_simdgroup);
  const int group = int(simdgroup_index_in_threadgroup);
  const int head_count = positions_shape[1];
  const int row_count = positions_shape[2];
  const int batch = int(threadgroup_position_in_grid.x) / head_count;
  const int head = int(threadgroup_position_in_grid.x) % head_count;
  const int64_t scores_start = batch * scores_strides[0] + head * scores_strides[1];
  const int64_t positions_start = batch * positions_strides[0] + head * positions_strides[1];
  const int sink_end = zones[0];
  const int recent_start = recent_starts[batch * recent_starts_strides[0]];
  const int dropped = zones[1];
  const int kept_count = row_count - dropped;

  // Rounds 0 to 31 find the bits of the upper word, the highest first, then the rest
  // those of the lower word.
  uint32_t upper = 0;
  uint32_t lower = 0;
  for (int round = 0; round < 64; round++) {
    const bool is_upper = round < 32;
    const uint32_t bit = 1u << (31 - round % 32);
    const uint32_t candidate = (is_upper ? upper : lower) | bit;
    int below = 0;
    for (int row = group * LANES + lane; row < row_count; row += NS * LANES) {
      const h2o_retention key = h2o_retention_key(
          scores[scores_start + row * scores_strides[2]],
          positions[positions_start + row * positions_strides[2]], row, sink_end, recent_start);
      const bool is_below = is_upper
          ? key.upper < candidate
          : key.upper < upper || (key.upper == upper && key.lower < candidate);
      below += is_below ? 1 : 0;
    }
    below = metal::simd_sum(below);
    if (lane == 0) {
      counts[group] = below;
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    const int all_below = metal::simd_sum(lane < NS ? counts[lane] : 0);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (all_below <= dropped) {
      if (is_upper) {
        upper = candidate;
      } else {
        lower = candidate;
      }
    }
  }

  // Each simdgroup scans consecutive rows; its rows that stay are written after those
  // of the simdgroups before it.
  const int part = (row_count + NS * LANES - 1) / (NS * LANES) * LANES;
  const int first = group * part;
  for (int pass = 0; pass < 2; pass++) {
    int before = 0;
    if (pass == 1) {
      before = metal::simd_sum(lane < group ? counts[lane] : 0);
    }
    int found = 0;
    for (int start = first; start < first + part; start += LANES) {
      const int row = start + lane;
      int stays = 0;
      if (row < row_count) {
        const h2o_retention key = h2o_retention_key(
            scores[scores_start + row * scores_strides[2]],
            positions[positions_start + row * positions_strides[2]], row, sink_end, recent_start);
        stays = key.upper > upper || (key.upper == upper && key.lower >= lower) ? 1 : 0;
      }
      // How many rows of this lane and the lanes before it stay.
      int so_far = stays;
      for (int distance = 1; distance < LANES; distance *= 2) {
        const int other = metal::simd_shuffle(so_far, ushort(metal::max(lane - distance, 0)));
        so_far += lane >= distance ? other : 0;
      }
      if (pass == 1 && stays == 1) {
        const int place = before + found + so_far - 1;
        kept[int64_t(threadgroup_position_in_grid.x) * kept_count + place] = uint32_t(row);
      }
      found += metal::simd_shuffle(so_far, ushort(LANES - 1));
    }
    if (pass == 0) {
      if (lane == 0) {
        counts[group] = found;
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
  }
