  // The mass of rows after a step: their previous mass (NaN, a new row, counts as 0)
  // plus the weights from all queries of their KV head (Zhang et al. 2023).
  //   grid (rows / (NS * 32) rounded up * NS * 32, B * Hkv, 1), threadgroup (NS * 32, 1, 1)
  //   scores [B, Hq, Lq, N] of the first N rows, lse [B, Hq, Lq]
  constexpr int LANES = 32;
  const int head = int(threadgroup_position_in_grid.y);  // counted over all sequences
  const int heads = importance_shape[1];
  const int row_count = importance_shape[2];
  const int group = int(threadgroup_position_in_grid.x) * NS + int(simdgroup_index_in_threadgroup);
  const int row = group * LANES + int(thread_index_in_simdgroup);
  if (row >= row_count) {
    return;
  }
  float mass = importance[(head / heads) * importance_strides[0] +
                          (head % heads) * importance_strides[1] + row * importance_strides[2]];
  const int scored = scores_shape[3];
  if (row < scored) {
    mass = mass == mass ? mass : 0.0f;
    const int queries = scores_shape[1] * scores_shape[2] / heads;
    const int64_t first = int64_t(head) * queries;
    for (int64_t query = first; query < first + queries; query++) {
      // If a query sees nothing, all its scores are -inf.
      const float total = lse[query] == H2O_NEGATIVE_INFINITY ? 0.0f : lse[query];
      mass += metal::precise::exp(scores[query * scored + row] - total);
    }
  }
  accumulated[int64_t(head) * row_count + row] = mass;
