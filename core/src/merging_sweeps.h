// The search for the cheapest mergers over the Vector of one SIMD target. Included once per target,
// after its simd_*.h and simd_partial.h: hence no include guard.

// The cheapest merger of each row with one behind it. A row has `width` floats, whole vectors.
inline void find_partners(const Free& free, int64_t width, float* costs, int* partners) {
  constexpr int kTogether = 4;
  const auto count = static_cast<int>(free.slots.size());
  const float *squares = free.squares.data(), *masses = free.masses.data();
  for (int first = 0; first < count; first += kTogether) {
    const int together = std::min(kTogether, count - first);
    const float* rows[kTogether];
    for (int i = 0; i < kTogether; ++i) {
      rows[i] = free.vectors.data() + (first + std::min(i, together - 1)) * width;
    }
    for (int other = first + 1; other < count; ++other) {
      const float* with = free.vectors.data() + other * width;
      Vector sums[kTogether];
      for (Vector& each : sums) each = broadcast(0);
      for (int64_t d = 0; d < width; d += kLanes) {
        const Vector part = load(with + d);
        for (int i = 0; i < kTogether; ++i) {
          sums[i] = multiply_add(load(rows[i] + d), part, sums[i]);
        }
      }
      for (int i = 0; i < together && first + i < other; ++i) {
        const int one = first + i;
        const float apart = squares[one] + squares[other] - 2 * sum(sums[i]);
        const float both = masses[one] * masses[other];
        const float cost = std::sqrt(both / (masses[one] + masses[other])) * std::max(apart, 0.0f);
        if (cost < costs[one]) {
          costs[one] = cost;
          partners[one] = other;
        }
      }
    }
  }
}
