  // The log of the softmax denominator of every query of a chunk.  A threadgroup of NS
  // simdgroups serves QUERIES query rows of one KV head; each simdgroup holds them in
  // registers and takes the keys by turns, so that a key is read once for all of them.
  //   grid (B * Hkv * NS * 32, query rows of a KV head / QUERIES rounded up, 1),
  //   threadgroup (NS * 32, 1, 1)
  //   T dtype of queries and keys, D their last axis; params = [scale, mask threshold]
  constexpr int LANES = 32;
  constexpr int KEY_PART = D / LANES;
  H2O_THREADGROUP(float, maxima, NS * QUERIES);
  H2O_THREADGROUP(float, totals, NS * QUERIES);
  const int lane = int(thread_index_in_simdgroup);
  const int group = int(simdgroup_index_in_threadgroup);
  const int heads = queries_shape[1];
  const int query_count = queries_shape[2];
  const int kv_heads = keys_shape[1];
  const int key_count = keys_shape[2];
  const int batch = int(threadgroup_position_in_grid.x) / kv_heads;
  const int kv_head = int(threadgroup_position_in_grid.x) % kv_heads;
  const int heads_of_group = heads / kv_heads;
  const int row_count = heads_of_group * query_count;
  const int first_row = int(threadgroup_position_in_grid.y) * QUERIES;

  float own[QUERIES][KEY_PART];
  h2o_softmax states[QUERIES];
  int row_heads[QUERIES];
  int row_queries[QUERIES];
  int ends[QUERIES];
  int last_end = 0;
  for (int r = 0; r < QUERIES; r++) {
    // The last row stands in for those behind it.
    const int row = metal::min(first_row + r, row_count - 1);
    row_heads[r] = kv_head * heads_of_group + row / query_count;
    row_queries[r] = row % query_count;
    ends[r] = CAUSAL ? key_count - query_count + row_queries[r] + 1 : key_count;
    last_end = metal::max(last_end, ends[r]);
    h2o_load<KEY_PART>(
        queries
            + h2o_offset(queries_strides, batch, row_heads[r], row_queries[r], lane * KEY_PART),
        queries_strides[3],
        own[r]);
    for (int i = 0; i < KEY_PART; i++) {
      own[r][i] *= params[0];
    }
    states[r] = h2o_softmax_empty();
#if sinks
    if (group == 0) {
      h2o_softmax_sink(states[r], static_cast<float>(sinks[row_heads[r] * sinks_strides[0]]));
    }
#endif
  }

  for (int key = group; key < last_end; key += NS) {
    float elements[KEY_PART];
    h2o_load<KEY_PART>(
        keys + h2o_offset(keys_strides, batch, kv_head, key, lane * KEY_PART),
        keys_strides[3],
        elements);
    for (int r = 0; r < QUERIES; r++) {
      bool visible = key < ends[r];
#if bool_mask
      visible =
          visible && mask[h2o_offset(mask_strides, batch, row_heads[r], row_queries[r], key)];
#endif
#if additive_mask
      float bias = 0.0f;
      if (visible) {
        bias = static_cast<float>(
            mask[h2o_offset(mask_strides, batch, row_heads[r], row_queries[r], key)]);
        visible = !(bias <= params[1]);
      }
#endif
      // The same for all lanes, so the collective is safe.
      if (visible) {
        float score = metal::simd_sum(h2o_dot<KEY_PART>(own[r], elements));
#if additive_mask
        score += bias;
        // fast::exp promises nothing for NaN: carry one from the mask by hand.
        states[r].total += bias - bias;
#endif
        h2o_softmax_count(states[r], score);
      }
    }
  }

  if (lane == 0) {
    for (int r = 0; r < QUERIES; r++) {
      maxima[group * QUERIES + r] = states[r].maximum;
      totals[group * QUERIES + r] = states[r].total;
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  // Lane g takes simdgroup g's part of a row.
  for (int r = group; r < QUERIES; r += NS) {
    h2o_softmax part = h2o_softmax_empty();
    if (lane < NS) {
      part.maximum = maxima[lane * QUERIES + r];
      part.total = totals[lane * QUERIES + r];
    }
    const h2o_merged merged = h2o_softmax_merge(part);
    const int row = first_row + r;
    if (lane == 0 && row < row_count) {
      const int64_t first = (int64_t(batch) * heads + kv_head * heads_of_group) * query_count;
      lses[first + row] = h2o_softmax_lse(merged.maximum, merged.total);
    }
  }
