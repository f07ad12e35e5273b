  // New keys and values, quantised as Metal's mx.quantize does it, bit for bit: in
  // groups of G elements with a scale and a bias.  A simdgroup serves one group,
  // first those of the keys, then those of the values.
  //   grid (groups of all rows * 32, 1, 1), threadgroup (32, 1, 1)
  //   T dtype of keys, their scales and biases, S that of values; KB, VB bits
  constexpr int LANES = 32;
  constexpr float LEAST_SCALE = 1e-7f;
  const int lane = int(thread_index_in_simdgroup);
  const int heads = new_keys_shape[1];
  const int rows = new_keys_shape[2];
  const int key_groups = new_keys_shape[3] / G;
  const int value_groups = new_values_shape[3] / G;
  const int64_t all_key_groups = int64_t(new_keys_shape[0]) * heads * rows * key_groups;
  const int64_t index = int64_t(threadgroup_position_in_grid.x);
  const bool is_key = index < all_key_groups;
  const int64_t group = is_key ? index : index - all_key_groups;
  const int groups = is_key ? key_groups : value_groups;
  const int64_t row = group / groups;
  const int first = int(group % groups) * G;
  const int batch = int(row / (int64_t(heads) * rows));
  const int head = int(row / rows % heads);
  const int token = int(row % rows);
  const int64_t key_start = h2o_offset(new_keys_strides, batch, head, token, first);
  const int64_t value_start = h2o_offset(new_values_strides, batch, head, token, first);

  // Metal's maximum starts at 0, so that a group of negative elements reaches up to 0.
  float least = H2O_NEGATIVE_INFINITY;
  float most = 0.0f;
  for (int j = lane; j < G; j += LANES) {
    const float element = is_key
        ? static_cast<float>(new_keys[key_start + j * new_keys_strides[3]])
        : static_cast<float>(new_values[value_start + j * new_values_strides[3]]);
    least = metal::max(least, -element);
    most = metal::max(most, element);
  }
  least = -metal::simd_max(least);
  most = metal::simd_max(most);
  const int bits = is_key ? KB : VB;
  const float highest = float((1 << bits) - 1);
  float scale = metal::max((most - least) / highest, LEAST_SCALE);
  const bool is_low = metal::abs(least) > metal::abs(most);
  scale = is_low ? scale : -scale;
  const float edge = is_low ? least : most;
  const float steps = metal::round(edge / scale);
  const bool is_zero = steps == 0.0f;
  scale = is_zero ? scale : edge / steps;
  const float bias = is_zero ? 0.0f : edge;
  if (lane == 0) {
    if (is_key) {
      key_scales[group] = static_cast<T>(scale);
      key_biases[group] = static_cast<T>(bias);
    } else {
      value_scales[group] = static_cast<S>(scale);
      value_biases[group] = static_cast<S>(bias);
    }
  }

  // A lane fills a word: a stream of `bits` per element, the lowest first.
  const int words = G * bits / 32;
  if (lane < words) {
    uint32_t word = 0;
    for (int j = lane * 32 / bits; j * bits < (lane + 1) * 32; j++) {
      const float element = is_key
          ? static_cast<float>(new_keys[key_start + j * new_keys_strides[3]])
          : static_cast<float>(new_values[value_start + j * new_values_strides[3]]);
      const uint32_t level =
          uint32_t(metal::min(metal::round((element - bias) / scale), highest));
      const int shift = j * bits - lane * 32;
      word |= shift < 0 ? level >> -shift : level << shift;
    }
    if (is_key) {
      key_words[group * words + lane] = word;
    } else {
      value_words[group * words + lane] = word;
    }
  }
