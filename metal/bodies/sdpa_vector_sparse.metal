  // Continues sdpa_vector.metal in `sparse` kernels: the second sweep, over the logits.
  // The value row of a pair whose weight is below params[2] is not read and adds
  // nothing (Turney 2026, sec. 3.1); the denominator includes it.
#if !keys
  // Each lane reads one block of the first launch.
  const bool has_part = lane < NS;
  h2o_softmax part = h2o_softmax_empty();
  if (lane < blocks) {
    part.maximum = partial_maxima[row * blocks + lane];
    part.total = partial_totals[row * blocks + lane];
  }
  const h2o_merged merged = h2o_softmax_merge(part);
  const float maximum = metal::simd_shuffle(part.maximum, ushort(block));
  const float share = metal::simd_shuffle(merged.share, ushort(block));
#endif
#if sparse
#if values
#if keys
  const float maximum = merged.maximum;
  const float share = 1.0f;
#endif
  // Weights are relative to the maximum over the keys of this threadgroup; times
  // `share`, they are relative to all keys.  Each lane computes the weight of one key;
  // then all lanes together read the rows that count.
  const float least = params[2] * merged.total;
#if skipped
  H2O_THREADGROUP(float, counts, NS);
  float count = 0.0f;
#endif
  for (int start = first_key; start < key_count; start += LANES * key_step) {
    const int own_key = start + lane * key_step;
    const float score =
        own_key < key_count ? scores[row * key_count + own_key] : H2O_NEGATIVE_INFINITY;
    float own_weight = 0.0f;
    // Skip masked pairs, and NaN from a mask, which is in the total anyway.
    if (!(score <= H2O_LOWEST)) {
      own_weight = metal::fast::exp(score - maximum);
      if (own_weight * share < least) {
        own_weight = 0.0f;
#if skipped
        count += 1.0f;
#endif
      }
    }
    for (int from = 0, i = start; from < LANES && i < key_count; from++, i += key_step) {
      const float weight = metal::simd_shuffle(own_weight, ushort(from));
      // Uniform across lanes.
      if (weight == 0.0f) {
        continue;
      }
      float value[VALUE_PART];
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
      h2o_add_row<VALUE_PART>(sums, weight, value);
    }
  }
#if skipped
  const float group_count = metal::simd_sum(count);
  if (lane == 0) {
    counts[group] = group_count;
  }
#endif
#endif
#endif
