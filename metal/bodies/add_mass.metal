  // What rows have after a step: the mass they had, NaN of a new row counting as 0, and the
  // weights that all queries of their KV head give them (Zhang et al. 2023).
  //   grid (rows / (NS * 32) rounded up * NS * 32, B * Hkv, 1), threadgroup (NS * 32, 1, 1)
  //   scores [B, Hq, Lq, N] of the first N rows, lse [B, Hq, Lq]
  constexpr int LANES = 32;
  const int head = int(threadgroup_position_in_grid.y);  // of all sequences
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
      // Of a query that sees nothing all scores are -inf.
      const float total = lse[query] == H2O_NEGATIVE_INFINITY ? 0.0f : lse[query];
      mass += metal::precise::exp(scores[query * scored + row] - total);
    }
  }
  accumulated[int64_t(head) * row_count + row] = mass;
