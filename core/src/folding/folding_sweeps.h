// The search for the nearest rows over the Vector of one SIMD target. Included once per target,
// after its simd_*.h: hence no include guard.

// nearest[i] = the stayer nearest to evicted row i, the first in a tie; apart[i] = the squared
// distance. A row has `width` floats, whole vectors.
inline void find_nearest(const Features& going, const Features& stayers, int64_t width,
                         int* nearest, float* apart) {
  constexpr int kTogether = 4;
  const auto count = static_cast<int>(going.slots.size());
  for (int first = 0; first < count; first += kTogether) {
    const int together = std::min(kTogether, count - first);
    const float* rows[kTogether];
    for (int i = 0; i < kTogether; ++i) {
      rows[i] = going.vectors.data() + (first + std::min(i, together - 1)) * width;
    }
    std::fill(apart + first, apart + first + together, kInfinity);
    for (int other = 0; other < static_cast<int>(stayers.slots.size()); ++other) {
      const float* with = stayers.vectors.data() + other * width;
      Vector sums[kTogether];
      for (Vector& each : sums) each = broadcast(0);
      for (int64_t d = 0; d < width; d += kLanes) {
        const Vector part = load(with + d);
        for (int i = 0; i < kTogether; ++i) {
          sums[i] = multiply_add(load(rows[i] + d), part, sums[i]);
        }
      }
      const float square = stayers.squares[static_cast<size_t>(other)];
      for (int i = 0; i < together; ++i) {
        const float own = square - 2 * sum(sums[i]);
        if (own < apart[first + i]) {
          apart[first + i] = own;
          nearest[first + i] = other;
        }
      }
    }
    for (int row = first; row < first + together; ++row)
      apart[row] += going.squares[static_cast<size_t>(row)];
  }
}
