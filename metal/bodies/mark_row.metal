  // What is remembered of a new row, in the place of a row that is known: importance
  // and positions come out with NaN ("not yet scored") and its position there.  A
  // thread serves one row of the cache.
  //   grid (N rounded up to a multiple of NS * 32, B * H, 1), threadgroup (NS * 32, 1, 1)
  //   place = [position of the new row]
  constexpr int LANES = 32;
  const int row = int(threadgroup_position_in_grid.x) * NS * LANES
      + int(simdgroup_index_in_threadgroup) * LANES + int(thread_index_in_simdgroup);
  const int head_count = importance_shape[1];
  const int row_count = importance_shape[2];
  if (row >= row_count) {
    return;
  }
  const int batch_head = int(threadgroup_position_in_grid.y);
  const int batch = batch_head / head_count;
  const int head = batch_head % head_count;
  const int slot = int(slots[batch * slots_strides[0] + head * slots_strides[1]]);
  const float old_importance = importance[batch * importance_strides[0]
                                          + head * importance_strides[1]
                                          + row * importance_strides[2]];
  const int old_position = positions[batch * positions_strides[0] + head * positions_strides[1]
                                     + row * positions_strides[2]];
  const int64_t marked = int64_t(batch_head) * row_count + row;
  new_importance[marked] = row == slot ? H2O_NAN : old_importance;
  new_positions[marked] = row == slot ? place[0] : old_position;
