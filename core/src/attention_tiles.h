// The three inner loops of attention, over the Vector of one SIMD target. Included once per target,
// after its simd_*.h and simd_partial.h, inside its namespace and target region: hence no include
// guard.

constexpr int kKeyTile = 4;

// exp(x) for x <= 0, to about 2 ulp; 0 where the result would be subnormal; NaN stays NaN.
inline Vector exp_nonpositive(Vector x) {
  // Adding 1.5 * 2^23 rounds x / ln 2 to an integer n and leaves n in the low bits.
  const Vector magic = broadcast(12582912.0f);
  const Vector shifted = multiply_add(x, broadcast(1.44269504088896341f), magic);
  const Vector n = shifted - magic;
  Vector r = multiply_add(n, broadcast(-0.693359375f), x);  // ln 2 in two parts (Cody and Waite)
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  // Minimax polynomial of Cephes' expf on [-ln 2 / 2, ln 2 / 2].
  Vector p = broadcast(1.9875691500e-4f);
  p = multiply_add(p, r, broadcast(1.3981999507e-3f));
  p = multiply_add(p, r, broadcast(8.3334519073e-3f));
  p = multiply_add(p, r, broadcast(4.1665795894e-2f));
  p = multiply_add(p, r, broadcast(1.6666665459e-1f));
  p = multiply_add(p, r, broadcast(5.0000001201e-1f));
  p = multiply_add(p, r * r, r + broadcast(1.0f));
  return zero_below(x, broadcast(-87.3f), p * exponent_from_low_bits(shifted));
}

// scores[i, j] = scale * queries[i] . keys[j] for Rows x Keys pairs. The queries are padded with
// zeros to whole vectors, the keys are not.
template <int Rows, int Keys, typename T>
inline void dot_tile(const float* queries, int64_t query_stride, const T* keys, int64_t key_stride,
                     int width, float scale, float* scores, int64_t score_stride) {
  Vector sums[Rows][Keys];
  MLX_H2O_UNROLL
  for (int i = 0; i < Rows; ++i) {
    MLX_H2O_UNROLL
    for (int j = 0; j < Keys; ++j) sums[i][j] = broadcast(0);
  }
  for (int d = 0; d < width; d += kLanes) {
    Vector key[Keys];
    MLX_H2O_UNROLL
    for (int j = 0; j < Keys; ++j) {
      const T* from = keys + j * key_stride + d;
      key[j] = d + kLanes <= width ? load(from) : load_partial(from, width - d);
    }
    MLX_H2O_UNROLL
    for (int i = 0; i < Rows; ++i) {
      const Vector query = load(queries + i * query_stride + d);
      MLX_H2O_UNROLL
      for (int j = 0; j < Keys; ++j) sums[i][j] = multiply_add(query, key[j], sums[i][j]);
    }
  }
  MLX_H2O_UNROLL
  for (int i = 0; i < Rows; ++i) {
    MLX_H2O_UNROLL
    for (int j = 0; j < Keys; ++j) scores[i * score_stride + j] = scale * sum(sums[i][j]);
  }
}

template <int Rows, typename T>
inline void dot_rows(const float* queries, int64_t query_stride, const T* keys, int64_t key_stride,
                     int key_count, int width, float scale, float* scores, int64_t score_stride) {
  int key = 0;
  for (; key + kKeyTile <= key_count; key += kKeyTile) {
    dot_tile<Rows, kKeyTile>(queries, query_stride, keys + key * key_stride, key_stride, width,
                             scale, scores + key, score_stride);
  }
  for (; key < key_count; ++key) {
    dot_tile<Rows, 1>(queries, query_stride, keys + key * key_stride, key_stride, width, scale,
                      scores + key, score_stride);
  }
}

// sums[i, d : d + Vectors * kLanes] += sum over the listed keys of weights[i, key] * values[key].
// Summing a block of keys in registers first also keeps long sums accurate.
template <int Rows, int Vectors, typename T>
inline void add_values(const float* weights, int64_t weight_stride, const int* keys, int key_count,
                       const T* values, int64_t value_stride, int lanes, float* sums,
                       int64_t sum_stride) {
  Vector block[Rows][Vectors];
  MLX_H2O_UNROLL
  for (int i = 0; i < Rows; ++i) {
    MLX_H2O_UNROLL
    for (int c = 0; c < Vectors; ++c) block[i][c] = broadcast(0);
  }
  for (int index = 0; index < key_count; ++index) {
    const int key = keys[index];
    const T* from = values + key * value_stride;
    Vector value[Vectors];
    MLX_H2O_UNROLL
    for (int c = 0; c < Vectors; ++c) {
      value[c] = lanes == kLanes ? load(from + c * kLanes) : load_partial(from, lanes);
    }
    MLX_H2O_UNROLL
    for (int i = 0; i < Rows; ++i) {
      const Vector weight = broadcast(weights[i * weight_stride + key]);
      MLX_H2O_UNROLL
      for (int c = 0; c < Vectors; ++c) block[i][c] = multiply_add(weight, value[c], block[i][c]);
    }
  }
  MLX_H2O_UNROLL
  for (int i = 0; i < Rows; ++i) {
    MLX_H2O_UNROLL
    for (int c = 0; c < Vectors; ++c) {
      float* to = sums + i * sum_stride + c * kLanes;
      store(to, load(to) + block[i][c]);
    }
  }
}

template <int Rows, typename T>
inline void add_value_rows(const float* weights, int64_t weight_stride, const int* keys,
                           int key_count, const T* values, int64_t value_stride, int width,
                           float* sums, int64_t sum_stride) {
  constexpr int kVectors = 4;
  int d = 0;
  for (; d + kVectors * kLanes <= width; d += kVectors * kLanes) {
    add_values<Rows, kVectors>(weights, weight_stride, keys, key_count, values + d, value_stride,
                               kLanes, sums + d, sum_stride);
  }
  for (; d < width; d += kLanes) {
    const int lanes = width - d < kLanes ? width - d : kLanes;
    add_values<Rows, 1>(weights, weight_stride, keys, key_count, values + d, value_stride, lanes,
                        sums + d, sum_stride);
  }
}
