  // Decode attention (AtomGradient 2026, sec. 3.1 and 3.5).  A threadgroup of NS
  // simdgroups serves one query row and all keys or, with `blocks`, one block of the
  // keys; a second pass merges the blocks.  Simdgroups take keys in turn; a lane holds
  // neighbouring elements of the query and of the output.
  //
  // `sparse` kernels take two sweeps, the second over the values of keys whose weights
  // count; the logits are kept in `scores`.  With `blocks` the sweeps are two launches,
  // `keys` and `values`, because weights are final only when every block has its total.
  //
  //   grid (B * Hq * NS * 32, Lq, blocks), threadgroup (NS * 32, 1, 1)
  //   T dtype of queries, dense keys and values, and out; D, V their last axes;
  //   KB, VB bits of keys and values, G elements that share a scale;
  //   with codes of rotated rows T is float, scales are norms, and queries and out are
  //   in the bases of the codes;
  //   params = [scale, mask threshold, sparse V threshold]
  constexpr int LANES = 32;
#if keys
  constexpr int KEY_PART = D / LANES;
  H2O_THREADGROUP(float, maxima, NS);
  H2O_THREADGROUP(float, totals, NS);
#endif
#if values
  constexpr int VALUE_PART = V / LANES;
  H2O_THREADGROUP(float, tile, NS * (LANES + 1));
#endif

  const int lane = int(thread_index_in_simdgroup);
  const int group = int(simdgroup_index_in_threadgroup);
  const int batch_head = int(threadgroup_position_in_grid.x);
  const int query_index = int(threadgroup_position_in_grid.y);
#if keys
  const int heads = queries_shape[1];
  const int query_count = queries_shape[2];
#if quantized
#if dense_keys
  const int key_count = keys_shape[2];
  const int kv_heads = keys_shape[1];
#else
  const int key_count = key_words_shape[2];
  const int kv_heads = key_words_shape[1];
#endif
#else
  const int key_count = keys_shape[2];
  const int kv_heads = keys_shape[1];
#endif
#else
  const int heads = scores_shape[1];
  const int query_count = scores_shape[2];
  const int key_count = scores_shape[3];
  const int kv_heads = value_words_shape[1];
#endif
  const int batch = batch_head / heads;
  const int head = batch_head % heads;
  const int kv_head = head / (heads / kv_heads);
  const int64_t row = int64_t(batch_head) * query_count + query_index;
#if blocks
  const int block = int(threadgroup_position_in_grid.z);
  const int blocks = int(threadgroups_per_grid.z);
  const int first_key = block * NS + group;
  const int key_step = blocks * NS;
#else
  const int first_key = group;
  const int key_step = NS;
#endif

#if values
  float sums[VALUE_PART];
  for (int j = 0; j < VALUE_PART; j++) {
    sums[j] = 0.0f;
  }
#if quantized
  const int64_t value_words_start = h2o_offset(value_words_strides, batch, kv_head, 0, 0);
  const int64_t value_scales_start = h2o_offset(value_scales_strides, batch, kv_head, 0, 0);
#if !value_codes
  const int64_t value_biases_start = h2o_offset(value_biases_strides, batch, kv_head, 0, 0);
#endif
#else
  const int64_t value_start = h2o_offset(values_strides, batch, kv_head, 0, lane * VALUE_PART);
#endif
#endif

#if keys
  float query[KEY_PART];
  h2o_load<KEY_PART>(
      queries + h2o_offset(queries_strides, batch, head, query_index, lane * KEY_PART),
      queries_strides[3],
      query);
  for (int j = 0; j < KEY_PART; j++) {
    query[j] *= params[0];
  }
  h2o_softmax state = h2o_softmax_empty();
#if sinks
  if (first_key == 0) {
    h2o_softmax_sink(state, static_cast<float>(sinks[head * sinks_strides[0]]));
  }
#endif

#if quantized
#if dense_keys
  const int64_t key_start = h2o_offset(keys_strides, batch, kv_head, 0, lane * KEY_PART);
#else
  const int64_t key_words_start = h2o_offset(key_words_strides, batch, kv_head, 0, 0);
  const int64_t key_scales_start = h2o_offset(key_scales_strides, batch, kv_head, 0, 0);
#if !key_codes
  const int64_t key_biases_start = h2o_offset(key_biases_strides, batch, kv_head, 0, 0);
#endif
#endif
#else
  const int64_t key_start = h2o_offset(keys_strides, batch, kv_head, 0, lane * KEY_PART);
#endif
#if bool_mask
  const int64_t mask_start = h2o_offset(mask_strides, batch, head, query_index, 0);
#endif
#if additive_mask
  const int64_t mask_start = h2o_offset(mask_strides, batch, head, query_index, 0);
#endif
#if row_bias
  const int64_t row_bias_start = batch * row_bias_strides[0] + kv_head * row_bias_strides[1];
#endif
  const int visible_end = CAUSAL ? key_count - query_count + query_index + 1 : key_count;

  for (int i = first_key; i < key_count; i += key_step) {
    bool visible = i < visible_end;
#if bool_mask
    visible = visible && mask[mask_start + i * mask_strides[3]];
#endif
#if additive_mask
    const float bias = static_cast<float>(mask[mask_start + i * mask_strides[3]]);
    visible = visible && !(bias <= params[1]);
#endif
#if row_bias
    const float own_bias = row_bias[row_bias_start + i * row_bias_strides[2]];
    visible = visible && !(own_bias <= H2O_LOWEST);
#endif
#if scores
    if (!visible && lane == 0) {
      scores[row * key_count + i] = H2O_NEGATIVE_INFINITY;
    }
#endif
    // Uniform across lanes, so the collectives below are safe.
    if (visible) {
      float key[KEY_PART];
#if quantized
#if dense_keys
      const int64_t key_row = key_start + i * keys_strides[2];
      h2o_load<KEY_PART>(keys + key_row, keys_strides[3], key);
#else
#if key_codes
      h2o_load_codes<KEY_PART, KB>(
          key_words + (key_words_start + i * key_words_strides[2]), key_words_strides[3],
          key_levels, key_scales[key_scales_start + i * key_scales_strides[2]],
          lane * KEY_PART, key);
#else
      h2o_load_quantized<KEY_PART, KB, G>(
          key_words + (key_words_start + i * key_words_strides[2]), key_words_strides[3],
          key_scales + (key_scales_start + i * key_scales_strides[2]), key_scales_strides[3],
          key_biases + (key_biases_start + i * key_biases_strides[2]), key_biases_strides[3],
          lane * KEY_PART, key);
#endif
#endif
#else
      const int64_t key_row = key_start + i * keys_strides[2];
      h2o_load<KEY_PART>(keys + key_row, keys_strides[3], key);
#endif
#if !sparse
      float value[VALUE_PART];
#if !quantized
      const int64_t value_row = value_start + i * values_strides[2];
      h2o_load<VALUE_PART>(values + value_row, values_strides[3], value);
#endif
#endif
      float score = metal::simd_sum(h2o_dot<KEY_PART>(query, key));
#if additive_mask
      score += bias;
      // fast::exp may lose NaN, so carry a NaN of the mask into the total.
      state.total += bias - bias;
#endif
#if row_bias
      score += own_bias;
      state.total += own_bias - own_bias;
#endif
#if scores
      if (lane == 0) {
        scores[row * key_count + i] = score;
      }
#endif
#if sparse
      h2o_softmax_count(state, score);
#else
      const float weight = h2o_softmax_weigh<VALUE_PART>(state, sums, score);
#if quantized
#if value_codes
      h2o_load_codes<VALUE_PART, VB>(
          value_words + (value_words_start + i * value_words_strides[2]), value_words_strides[3],
          value_levels, value_scales[value_scales_start + i * value_scales_strides[2]],
          lane * VALUE_PART, value);
#else
      h2o_load_quantized<VALUE_PART, VB, G>(
          value_words + (value_words_start + i * value_words_strides[2]), value_words_strides[3],
          value_scales + (value_scales_start + i * value_scales_strides[2]),
          value_scales_strides[3],
          value_biases + (value_biases_start + i * value_biases_strides[2]),
          value_biases_strides[3],
          lane * VALUE_PART, value);
#endif
#endif
      h2o_add_row<VALUE_PART>(sums, weight, value);
#endif
    }
  }

  // Merge the simdgroups.  Lane g of each simdgroup takes the part of simdgroup g.
  if (lane == 0) {
    maxima[group] = state.maximum;
    totals[group] = state.total;
  }
#if sparse
  // Other lanes read the logits than the lane that wrote them.
  metal::threadgroup_barrier(metal::mem_flags::mem_device | metal::mem_flags::mem_threadgroup);
#else
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
#endif
  const bool has_part = lane < NS;
  h2o_softmax part = h2o_softmax_empty();
  if (has_part) {
    part.maximum = maxima[lane];
    part.total = totals[lane];
  }
  const h2o_merged merged = h2o_softmax_merge(part);
#endif
