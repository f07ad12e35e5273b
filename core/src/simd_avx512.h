// AVX-512 (F, BW, DQ, VL). Included once, inside the namespace and the target region of AVX-512.

using Vector = __m512;

constexpr int kLanes = 16;
constexpr int kRowTile = 4;  // 32 registers: 4 rows x 4 keys of sums, 4 keys, 1 query

inline Vector broadcast(float value) { return _mm512_set1_ps(value); }

inline Vector load(const float* from) { return _mm512_loadu_ps(from); }

inline Vector load(const Float16* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline Vector load(const BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline void store(float* to, Vector value) { _mm512_storeu_ps(to, value); }

inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }

inline Vector maximum(Vector a, Vector b) { return _mm512_max_ps(a, b); }

inline float sum(Vector value) {
  const __m256 half = _mm512_castps512_ps256(value) + _mm512_extractf32x8_ps(value, 1);
  const __m128 quarter = _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
  const __m128 pair = quarter + _mm_movehl_ps(quarter, quarter);
  return pair[0] + pair[1];
}

// value where x >= limit or x is NaN, else 0.
inline Vector zero_below(Vector x, Vector limit, Vector value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
}

// Reads the lanes as bits: (bits << 23) + the bits of 1.0f.
inline Vector exponent_from_low_bits(Vector value) {
  const __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(value), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x3f800000)));
}
