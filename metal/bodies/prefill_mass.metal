  // What a chunk of queries says of each key: the sum of their weights (Zhang et al.
  // 2023), given the lse of every query.  A simdgroup holds KEYS keys of one KV head in
  // registers, a lane neighbouring elements of each, and takes the queries in order: the
  // keys are read once, and nothing of Lq x N is kept.
  //   grid (B * Hkv * NS * 32, keys / (NS * KEYS) rounded up, 1),
  //   threadgroup (NS * 32, 1, 1)
  //   T dtype of queries and keys, D their last axis;
  //   params = [scale, mask threshold]
  constexpr int LANES = 32;
  constexpr int KEY_PART = D / LANES;
  const int lane = int(thread_index_in_simdgroup);
  const int heads = queries_shape[1];
  const int query_count = queries_shape[2];
  const int kv_heads = keys_shape[1];
  const int key_count = keys_shape[2];
  const int batch = int(threadgroup_position_in_grid.x) / kv_heads;
  const int kv_head = int(threadgroup_position_in_grid.x) % kv_heads;
  const int heads_of_group = heads / kv_heads;
  const int first_head = kv_head * heads_of_group;
  const int first_key =
      (int(threadgroup_position_in_grid.y) * NS + int(simdgroup_index_in_threadgroup)) * KEYS;
  // The same for all lanes, and no barrier follows.
  if (first_key >= key_count) {
    return;
  }
  const int own_keys = metal::min(KEYS, key_count - first_key);
  const int64_t row_start = int64_t(threadgroup_position_in_grid.x) * key_count + first_key;

  float own[KEYS][KEY_PART];
  float results[KEYS];
  for (int k = 0; k < KEYS; k++) {
    // The last key stands in for those behind it.
    const int key = first_key + metal::min(k, own_keys - 1);
    h2o_load<KEY_PART>(
        keys + h2o_offset(keys_strides, batch, kv_head, key, lane * KEY_PART),
        keys_strides[3],
        own[k]);
    results[k] = 0.0f;
  }

  for (int query_index = 0; query_index < query_count; query_index++) {
    const int visible_end = CAUSAL ? key_count - query_count + query_index + 1 : key_count;
    float sums[KEYS];
    for (int k = 0; k < KEYS; k++) {
      sums[k] = 0.0f;
    }
    for (int j = 0; j < heads_of_group; j++) {
      const int head = first_head + j;
      const float denominator = lses[(int64_t(batch) * heads + head) * query_count + query_index];
      if (denominator == H2O_NEGATIVE_INFINITY) {
        continue;
      }
      // fast::exp promises nothing for NaN: carry one by hand, to every key.
      for (int k = 0; k < KEYS; k++) {
        sums[k] += denominator - denominator;
      }
      if (first_key >= visible_end) {
        continue;
      }
      float query[KEY_PART];
      h2o_load<KEY_PART>(
          queries + h2o_offset(queries_strides, batch, head, query_index, lane * KEY_PART),
          queries_strides[3],
          query);
      for (int i = 0; i < KEY_PART; i++) {
        query[i] *= params[0];
      }
      for (int k = 0; k < KEYS; k++) {
        bool visible = k < own_keys && first_key + k < visible_end;
#if bool_mask
        visible =
            visible && mask[h2o_offset(mask_strides, batch, head, query_index, first_key + k)];
#endif
#if additive_mask
        float bias = 0.0f;
        if (visible) {
          bias = static_cast<float>(
              mask[h2o_offset(mask_strides, batch, head, query_index, first_key + k)]);
          visible = !(bias <= params[1]);
        }
#endif
        // The same for all lanes, so the collective is safe.
        if (visible) {
          float score = metal::simd_sum(h2o_dot<KEY_PART>(query, own[k]));
#if additive_mask
          score += bias;
#endif
          sums[k] += metal::fast::exp(score - denominator);
        }
      }
    }
    for (int k = 0; k < KEYS; k++) {
      results[k] += sums[k];
    }
  }
  for (int k = 0; k < KEYS; k++) {
    if (lane == 0 && k < own_keys) {
      accumulated[row_start + k] = results[k];
    }
  }
