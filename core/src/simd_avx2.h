// AVX2 with FMA and F16C. Included once, inside the namespace and the target region of AVX2.

using Vector = __m256;

constexpr int kLanes = 8;
constexpr int kRowTile = 2;  // 16 registers: 2 rows x 4 keys of sums, 4 keys, 1 query

inline Vector broadcast(float value) { return _mm256_set1_ps(value); }

inline Vector load(const float* from) { return _mm256_loadu_ps(from); }

inline Vector load(const Float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline Vector load(const BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline void store(float* to, Vector value) { _mm256_storeu_ps(to, value); }

inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

inline Vector maximum(Vector a, Vector b) { return _mm256_max_ps(a, b); }

inline float sum(Vector value) {
  const __m128 half = _mm256_castps256_ps128(value) + _mm256_extractf128_ps(value, 1);
  const __m128 pair = half + _mm_movehl_ps(half, half);
  return pair[0] + pair[1];
}

// value where x >= limit or x is NaN, else 0.
inline Vector zero_below(Vector x, Vector limit, Vector value) {
  return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), value);
}

// Reads the lanes as bits: (bits << 23) + the bits of 1.0f.
inline Vector exponent_from_low_bits(Vector value) {
  const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(value), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3f800000)));
}
