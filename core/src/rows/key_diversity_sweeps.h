// The two sweeps of key diversity over the Vector of one SIMD target. Included once per target,
// after its simd_*.h: hence no include guard.

template <typename T>
inline float dot(const T* key, const float* other, int width) {
  Vector total = broadcast(0);
  for (int d = 0; d < width; d += kLanes) {
    total = multiply_add(load_from(key + d, width - d), load(other + d), total);
  }
  return sum(total);
}

template <typename T>
inline float squared_norm(const T* key, int width) {
  Vector total = broadcast(0);
  for (int d = 0; d < width; d += kLanes) {
    const Vector part = load_from(key + d, width - d);
    total = multiply_add(part, part, total);
  }
  return sum(total);
}

template <typename T>
inline void add_scaled(const T* key, float factor, int width, float* sums) {
  const Vector scale = broadcast(factor);
  for (int d = 0; d < width; d += kLanes) {
    store(sums + d, multiply_add(load_from(key + d, width - d), scale, load(sums + d)));
  }
}

// `mean` has room for the width in whole vectors. `result` first holds the reciprocal norms.
template <typename T>
void diversity_of_head(const T* keys, int64_t stride, int rows, int width, float* mean,
                       float* result) {
  const int padded = (width + kLanes - 1) / kLanes * kLanes;
  std::fill(mean, mean + padded, 0.0f);
  for (int row = 0; row < rows; ++row) {
    const T* key = keys + row * stride;
    const float norm = std::sqrt(squared_norm(key, width));
    // Not std::max, which would hide NaN.
    result[row] = 1 / (norm < kLeastNorm ? kLeastNorm : norm);
    add_scaled(key, result[row], width, mean);
  }
  // The length of the mean cancels in the cosine, unless it is almost 0.
  const float norm = std::sqrt(squared_norm(mean, width)) / static_cast<float>(rows);
  const float factor = -1 / ((norm < kLeastNorm ? kLeastNorm : norm) * static_cast<float>(rows));
  for (int row = 0; row < rows; ++row) {
    result[row] = dot(keys + row * stride, mean, width) * factor * result[row];
  }
}

inline void diversity(const KeyDiversityArguments& a, int batch, int head, float* mean) {
  const int64_t first = (static_cast<int64_t>(batch) * a.heads + head) * a.rows;
  with_type(a.type, [&]<typename T>(T) {
    const T* keys =
        static_cast<const T*>(a.keys) + batch * a.key_strides[0] + head * a.key_strides[1];
    diversity_of_head(keys, a.key_strides[2], a.rows, a.width, mean, a.result + first);
  });
}
