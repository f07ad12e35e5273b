// One pass over the rows of a head: the moving average. It uses the compiler's own vectors, which
// every target has, and handles the rest of the rows one by one with the same template. Included
// once per SIMD target, after its simd_*.h: hence no include guard.

using Floats = float __attribute__((vector_size(sizeof(Vector))));
using Ints = int32_t __attribute__((vector_size(sizeof(Vector))));

template <typename To, typename From>
inline To lanes_at(const From* from) {
  To lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline bool all_finite(float value) { return value - value == 0; }
inline bool all_finite(Floats value) {
  return nonzero_lanes(reinterpret_cast<Vector>(value - value)) == 0;  // inf and NaN become NaN
}

inline float absolute(float value) { return std::fabs(value); }
inline Floats absolute(Floats value) {
  const Ints bits = lanes_at<Ints>(&value) & std::numeric_limits<int32_t>::max();
  return lanes_at<Floats>(&bits);
}

// The mean of the unmasked scores (neither -inf nor NaN), and their number.
template <typename Float>
struct Mean {
  Float value{}, count{};

  Mean(const float* scores, int64_t stride, int members) {
    const Float one = Float{} + 1.0f;
    for (int member = 0; member < members; ++member) {
      const auto score = lanes_at<Float>(scores + member * stride);
      value += score > -kInfinity ? score : Float{};
      count += score > -kInfinity ? one : Float{};
    }
    value /= count > one ? count : one;
  }
};

// C = keep * C + take * |mean|; `before` is C. Members is the number of group members if it is a
// small power of two, else 0.
template <int Members, typename Float>
inline Float averaged(const float* scores, int64_t stride, int members, Decay decay, Float before) {
  const auto with = [&](Float score) {
    const Float result = decay.keep * before + decay.take * score;
    return before == before ? result : score;
  };
  if constexpr (Members != 0) {
    auto sum = lanes_at<Float>(scores);
    MLX_H2O_UNROLL
    for (int member = 1; member < Members; ++member) {
      sum += lanes_at<Float>(scores + member * stride);
    }
    // Nothing is masked, and multiplying by a power of two gives the same bits as dividing.
    if (all_finite(sum)) return with(absolute(sum * (1.0f / Members)));
  }
  const Mean<Float> mean(scores, stride, members);
  return mean.count > 0 ? with(absolute(mean.value)) : before;
}

// Calls `work` with the first row and the type to use: whole vectors first, then single rows.
template <typename Work>
inline void for_rows(int count, const Work& work) {
  int row = 0;
  for (; row + kLanes <= count; row += kLanes) work(row, Floats{});
  for (; row < count; ++row) work(row, 0.0f);
}

template <int Members>
inline void take_in_group(const ScoredBlock& block) {
  const ScoredBlock b = block;  // a copy, so that the compiler knows that stores do not change it
  for_rows(b.count, [&](int row, auto of_type) {
    auto importance = lanes_at<decltype(of_type)>(b.importance + row);
    for (int query = 0; query < b.query_count; ++query) {
      importance = averaged<Members>(b.scores + query * b.stride + row, b.query_count * b.stride,
                                     b.group, b.decay, importance);
    }
    std::memcpy(b.importance + row, &importance, sizeof importance);
  });
}

inline void take_in(const ScoredBlock& block) {
  switch (block.group) {
    case 1:
      return take_in_group<1>(block);
    case 2:
      return take_in_group<2>(block);
    case 4:
      return take_in_group<4>(block);
    case 8:
      return take_in_group<8>(block);
    default:
      return take_in_group<0>(block);
  }
}
