  // The statistics of keys (their normalised sum, and a reciprocal norm of each) when
  // a new key takes the place of another: that one is subtracted, the new one added.
  // A threadgroup of NS simdgroups serves one head; its first simdgroup has the keys,
  // a lane neighbouring elements of them, and all of them copy the other norms.
  //   grid (B * H * NS * 32, 1, 1), threadgroup (NS * 32, 1, 1)
  //   T dtype of the keys, or of their scales and biases; D their last axis;
  //   KB bits, G elements that share a scale
  constexpr int LANES = 32;
  constexpr int KEY_PART = D / LANES;
  const int lane = int(thread_index_in_simdgroup);
  const int group = int(simdgroup_index_in_threadgroup);
  const int head_count = inverse_norms_shape[1];
  const int row_count = inverse_norms_shape[2];
  const int batch_head = int(threadgroup_position_in_grid.x);
  const int batch = batch_head / head_count;
  const int head = batch_head % head_count;
  const int64_t norms_start = batch * inverse_norms_strides[0] + head * inverse_norms_strides[1];
  const int64_t copy_start = int64_t(batch_head) * row_count;
  const int slot = int(slots[batch * slots_strides[0] + head * slots_strides[1]]);

  for (int row = group * LANES + lane; row < row_count; row += NS * LANES) {
    if (row != slot) {
      const float norm = inverse_norms[norms_start + row * inverse_norms_strides[2]];
      new_inverse_norms[copy_start + row] = norm;
    }
  }
  if (group == 0) {
    float old_key[KEY_PART];
    float new_key[KEY_PART];
#if quantized
    h2o_load_quantized<KEY_PART, KB, G>(
        key_words + h2o_offset(key_words_strides, batch, head, slot, 0), key_words_strides[3],
        key_scales + h2o_offset(key_scales_strides, batch, head, slot, 0), key_scales_strides[3],
        key_biases + h2o_offset(key_biases_strides, batch, head, slot, 0), key_biases_strides[3],
        lane * KEY_PART, old_key);
    h2o_load_quantized<KEY_PART, KB, G>(
        new_words + h2o_offset(new_words_strides, batch, head, 0, 0), new_words_strides[3],
        new_scales + h2o_offset(new_scales_strides, batch, head, 0, 0), new_scales_strides[3],
        new_biases + h2o_offset(new_biases_strides, batch, head, 0, 0), new_biases_strides[3],
        lane * KEY_PART, new_key);
#else
    h2o_load<KEY_PART>(
        stored_keys + h2o_offset(stored_keys_strides, batch, head, slot, lane * KEY_PART),
        stored_keys_strides[3],
        old_key);
    h2o_load<KEY_PART>(
        new_keys + h2o_offset(new_keys_strides, batch, head, 0, lane * KEY_PART),
        new_keys_strides[3],
        new_key);
#endif
    const float squares = metal::simd_sum(h2o_dot<KEY_PART>(new_key, new_key));
    const float new_norm = 1.0f / metal::max(metal::precise::sqrt(squares), H2O_LEAST_NORM);
    const float old_norm = inverse_norms[norms_start + slot * inverse_norms_strides[2]];
    for (int j = 0; j < KEY_PART; j++) {
      const int element = lane * KEY_PART + j;
      const float before = key_sum[batch * key_sum_strides[0] + head * key_sum_strides[1]
                                   + element * key_sum_strides[2]];
      new_key_sum[int64_t(batch_head) * D + element] =
          before + (new_key[j] * new_norm - old_key[j] * old_norm);
    }
    if (lane == 0) {
      new_inverse_norms[copy_start + slot] = new_norm;
    }
  }
