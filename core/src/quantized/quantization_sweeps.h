// Quantises one row, in loops that compilers vectorise for the target of the region. Included once
// per SIMD target: hence no include guard.

// As MLX chooses them: the edge of greater magnitude and 0 are represented exactly.
inline Affine affine_of_group(const float* values, int count, float levels) {
  constexpr int kParts = 16;
  float low[kParts];
  float high[kParts];
  std::fill(low, low + kParts, kInfinity);
  std::fill(high, high + kParts, -kInfinity);
  for (int first = 0; first < count; first += kParts) {  // a group is 32, 64 or 128
    for (int i = 0; i < kParts; ++i) {
      const float value = values[first + i];
      low[i] = value < low[i] ? value : low[i];  // this order ignores NaN
      high[i] = value > high[i] ? value : high[i];
    }
  }
  const float least = *std::min_element(low, low + kParts);
  const float most = *std::max_element(high, high + kParts);
  const bool negative = std::fabs(least) > std::fabs(most);
  const float step = std::max((most - least) / levels, 1e-7f);
  const float scale = negative ? step : -step;
  const float edge = negative ? least : most;
  const float zero = std::rint(edge / scale);
  if (zero == 0) return {scale, 0};
  return {edge / zero, edge};
}

template <typename T>
void quantize(const T* from, const PackedRow& to, int width) {
  const auto levels = static_cast<float>((1 << to.bits) - 1);
  T* scales = static_cast<T*>(to.scales);
  T* biases = static_cast<T*>(to.biases);
  BitWriter writer(to.words);
  float values[kMaxGroup];
  uint8_t packed[kMaxGroup];
  for (int first = 0; first < width; first += to.group_size) {
    for (int i = 0; i < to.group_size; i += kLanes) store(values + i, load(from + first + i));
    const auto [scale, bias] = affine_of_group(values, to.group_size, levels);
    for (int i = 0; i < to.group_size; ++i) {
      const float level = std::rint((values[i] - bias) / scale);
      const float below = level < levels ? level : levels;
      // This order turns NaN into 0.
      packed[i] = static_cast<uint8_t>(static_cast<int>(level > 0 ? below : 0.0f));
    }
    for (int i = 0; i < to.group_size; ++i) writer.put(packed[i], to.bits);
    *scales++ = round_to<T>(scale);
    *biases++ = round_to<T>(bias);
  }
}

inline void quantize(ElementType type, const void* from, const PackedRow& to, int width) {
  with_type(type, [&]<typename T>(T) { quantize(static_cast<const T*>(from), to, width); });
}
