  // The row that each head can best do without: an arg-min by the retention order
  // (docs/scores.md).  A threadgroup of NS simdgroups serves one head of one
  // sequence: each thread finds the worst of its rows, then the simdgroups, then
  // the threadgroup agree.  With `marks` a new row takes its place: importance
  // and positions come out with what is remembered of that one.
  //   grid (B * H * NS * 32, 1, 1), threadgroup (NS * 32, 1, 1)
  //   zones = [first position that is no sink]; of each sequence recent_starts =
  //   first position of the recent window, newest = position of the new row; AGE:
  //   the oldest row goes
  constexpr int LANES = 32;
  constexpr int PROTECTED = 0;
  constexpr int SCORED = 1;
  constexpr int UNSCORED = 2;
  constexpr int PADDING = 3;
  H2O_THREADGROUP(int, kinds, NS);
  H2O_THREADGROUP(float, worths, NS);
  H2O_THREADGROUP(int, places, NS);
  H2O_THREADGROUP(int, slots, NS);

  const int lane = int(thread_index_in_simdgroup);
  const int group = int(simdgroup_index_in_threadgroup);
  const int head_count = positions_shape[1];
  const int row_count = positions_shape[2];
  const int batch = int(threadgroup_position_in_grid.x) / head_count;
  const int head = int(threadgroup_position_in_grid.x) % head_count;
  const int64_t positions_start = batch * positions_strides[0] + head * positions_strides[1];
  const int recent_start = recent_starts[batch * recent_starts_strides[0]];
#if marks
  const int newest_position = newest[batch * newest_strides[0]];
  const int64_t importance_start = batch * importance_strides[0] + head * importance_strides[1];
#endif
#if !marks
  const int64_t scores_start = batch * scores_strides[0] + head * scores_strides[1];
#endif
#if ranked
  const int64_t scores_start = batch * scores_strides[0] + head * scores_strides[1];
#endif

  // The worst row so far: the highest kind, then the lowest worth, then the
  // highest place, then the lowest slot.  -1: no row yet.
  int kind = -1;
  float worth = 0.0f;
  int place = -1;
  int slot = 0;
  for (int row = group * LANES + lane; row < row_count; row += NS * LANES) {
    const int position = positions[positions_start + row * positions_strides[2]];
#if marks
#if ranked
    const float score = scores[scores_start + row * scores_strides[2]];
#else
    const float score = AGE ? static_cast<float>(position - newest_position)
                            : importance[importance_start + row * importance_strides[2]];
#endif
#else
    const float score = scores[scores_start + row * scores_strides[2]];
#endif
    int found = score != score ? UNSCORED : SCORED;
    if (position < zones[0] || position >= recent_start) {
      found = PROTECTED;
    }
    if (position < 0) {
      found = PADDING;
    }
    const float found_worth = found == SCORED ? score : 0.0f;
    const int found_place = position < 0 ? row : position;
    const bool same_worth = found == kind && found_worth == worth;
    if (found > kind || (found == kind && found_worth < worth)
        || (same_worth && found_place > place)) {
      kind = found;
      worth = found_worth;
      place = found_place;
      slot = row;
    }
  }

  // Twice the same: among the lanes of a simdgroup, then among the simdgroups,
  // lane g with the row of simdgroup g.
  for (int round = 0; round < 2; round++) {
    const int worst_kind = metal::simd_max(kind);
    const bool of_kind = kind == worst_kind;
    const float least_worth = -metal::simd_max(of_kind ? -worth : H2O_NEGATIVE_INFINITY);
    const bool of_worth = of_kind && worth == least_worth;
    const int last_place = metal::simd_max(of_worth ? place : -1);
    const int first_slot = -metal::simd_max(of_worth && place == last_place ? -slot : -row_count);
    if (round == 0) {
      if (lane == 0) {
        kinds[group] = worst_kind;
        worths[group] = least_worth;
        places[group] = last_place;
        slots[group] = first_slot;
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      const bool has_row = lane < NS;
      kind = has_row ? kinds[lane] : -1;
      worth = has_row ? worths[lane] : 0.0f;
      place = has_row ? places[lane] : -1;
      slot = has_row ? slots[lane] : 0;
    } else {
      slot = first_slot;
    }
  }
  if (group == 0 && lane == 0) {
    worst[threadgroup_position_in_grid.x] = uint32_t(slot);
  }
#if marks
  const int64_t marked_start = int64_t(threadgroup_position_in_grid.x) * row_count;
  for (int row = group * LANES + lane; row < row_count; row += NS * LANES) {
    const float old_importance = importance[importance_start + row * importance_strides[2]];
    const int old_position = positions[positions_start + row * positions_strides[2]];
    new_importance[marked_start + row] = row == slot ? H2O_NAN : old_importance;
    new_positions[marked_start + row] = row == slot ? newest_position : old_position;
  }
#endif
