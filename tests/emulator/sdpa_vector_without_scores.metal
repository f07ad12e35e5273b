// Decode attention written without the export of scores, without lse, masks and sinks.
// With those flags off the packaged kernel must be this text, line for line; an edit of the
// kernel is made here too, by hand.
  constexpr int LANES = 32;
  constexpr int KEY_PART = D / LANES;
  H2O_THREADGROUP(float, maxima, NS);
  H2O_THREADGROUP(float, totals, NS);
  constexpr int VALUE_PART = V / LANES;
  H2O_THREADGROUP(float, tile, NS * (LANES + 1));
  const int lane = int(thread_index_in_simdgroup);
  const int group = int(simdgroup_index_in_threadgroup);
  const int batch_head = int(threadgroup_position_in_grid.x);
  const int query_index = int(threadgroup_position_in_grid.y);
  const int heads = queries_shape[1];
  const int query_count = queries_shape[2];
  const int key_count = keys_shape[2];
  const int kv_heads = keys_shape[1];
  const int batch = batch_head / heads;
  const int head = batch_head % heads;
  const int kv_head = head / (heads / kv_heads);
  const int64_t row = int64_t(batch_head) * query_count + query_index;
  const int first_key = group;
  const int key_step = NS;
  float sums[VALUE_PART];
  for (int j = 0; j < VALUE_PART; j++) {
    sums[j] = 0.0f;
  }
  const int64_t value_start = h2o_offset(values_strides, batch, kv_head, 0, lane * VALUE_PART);
  float query[KEY_PART];
  h2o_load<KEY_PART>(
      queries + h2o_offset(queries_strides, batch, head, query_index, lane * KEY_PART),
      queries_strides[3],
      query);
  for (int j = 0; j < KEY_PART; j++) {
    query[j] *= params[0];
  }
  h2o_softmax state = h2o_softmax_empty();
  const int64_t key_start = h2o_offset(keys_strides, batch, kv_head, 0, lane * KEY_PART);
  const int visible_end = CAUSAL ? key_count - query_count + query_index + 1 : key_count;
  for (int i = first_key; i < key_count; i += key_step) {
    bool visible = i < visible_end;
    if (visible) {
      float key[KEY_PART];
      const int64_t key_row = key_start + i * keys_strides[2];
      h2o_load<KEY_PART>(keys + key_row, keys_strides[3], key);
      float value[VALUE_PART];
      const int64_t value_row = value_start + i * values_strides[2];
      h2o_load<VALUE_PART>(values + value_row, values_strides[3], value);
      float score = metal::simd_sum(h2o_dot<KEY_PART>(query, key));
      const float weight = h2o_softmax_weigh<VALUE_PART>(state, sums, score);
      h2o_add_row<VALUE_PART>(sums, weight, value);
    }
  }
  if (lane == 0) {
    maxima[group] = state.maximum;
    totals[group] = state.total;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const bool has_part = lane < NS;
  h2o_softmax part = h2o_softmax_empty();
  if (has_part) {
    part.maximum = maxima[lane];
    part.total = totals[lane];
  }
  const h2o_merged merged = h2o_softmax_merge(part);
  H2O_UNROLL
  for (int j = 0; j < VALUE_PART; j++) {
    tile[group * (LANES + 1) + lane] = sums[j];
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int column = group; column < LANES; column += NS) {
      const float column_part = has_part ? tile[lane * (LANES + 1) + column] * merged.share : 0.0f;
      const float sum = metal::simd_sum(column_part);
      if (lane == 0) {
        const float mean = h2o_softmax_mean(sum, merged.total);
        out[row * V + column * VALUE_PART + j] = static_cast<T>(mean);
      }
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
