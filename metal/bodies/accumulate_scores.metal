  // The moving average of scores over the queries in order (AtomGradient 2026,
  // sec. 3.2).  A thread serves one row of the cache; neighbours are neighbours in
  // memory, in the scores of every query and head.
  //   grid (N rounded up to a multiple of NS * 32, B * H, 1), threadgroup (NS * 32, 1, 1)
  //   params = [decay, 1 - decay]
  // Rows behind those that have scores stay as they are.
  constexpr int LANES = 32;
  const int row = int(threadgroup_position_in_grid.x) * NS * LANES
      + int(simdgroup_index_in_threadgroup) * LANES + int(thread_index_in_simdgroup);
  const int row_count = importance_shape[2];
  if (row >= row_count) {
    return;
  }
  const int kv_heads = importance_shape[1];
  const int batch = int(threadgroup_position_in_grid.y) / kv_heads;
  const int kv_head = int(threadgroup_position_in_grid.y) % kv_heads;
  const int heads_of_group = scores_shape[1] / kv_heads;
  const int query_count = row < scores_shape[3] ? scores_shape[2] : 0;
  const int first_head = kv_head * heads_of_group;

  float average = importance[batch * importance_strides[0] + kv_head * importance_strides[1]
                             + row * importance_strides[2]];
  for (int query = 0; query < query_count; query++) {
    float sum = 0.0f;
    int seen = 0;
    for (int j = 0; j < heads_of_group; j++) {
      const float score = scores[h2o_offset(scores_strides, batch, first_head + j, query, row)];
      // Neither what is masked nor NaN.
      if (score > H2O_NEGATIVE_INFINITY) {
        sum += score;
        seen += 1;
      }
    }
    if (seen > 0) {
      const float size = metal::abs(sum / float(seen));
      // NaN: this is the first score of the row.
      average = average != average ? size : params[0] * average + params[1] * size;
    }
  }
  accumulated[(int64_t(batch) * kv_heads + kv_head) * row_count + row] = average;
