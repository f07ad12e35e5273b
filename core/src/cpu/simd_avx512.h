// AVX-512 (F, BW, DQ, VL). Included once, inside the namespace and the target region of AVX-512.

using Vector = __m512;

constexpr SimdTarget kTarget = SimdTarget::avx512;
constexpr int kLanes = 16;
constexpr int kSums = 16;        // of 32 registers: the sums of one tile
constexpr int kRowTile = 4;      // rows of the largest tile
constexpr int kPackedRun = 64;   // elements of a packed row that are unpacked together
constexpr bool kLooksUp = true;  // codes are always looked up in one instruction

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

// A store to an aligned address that bypasses the caches.
inline void stream(float* to, Vector value) { _mm512_stream_ps(to, value); }

// Makes streaming stores visible before later stores.
inline void end_streams() { _mm_sfence(); }

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

// A mask as a number, through a general register: under register pressure, GCC 12 spills the 16
// bits of a mask and reads 64, including stale bits.
inline uint32_t bits_of(__mmask16 mask) {
  uint32_t bits = mask;
  __asm__("" : "+r"(bits));
  return bits;
}

// One bit for each lane of x that is at its limit, above it, or NaN.
inline uint32_t lanes_not_below(Vector x, Vector limit) {
  return bits_of(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ));
}

// One bit for each lane that is not 0; NaN is not.
inline uint32_t nonzero_lanes(Vector value) {
  return bits_of(_mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_NEQ_UQ));
}

// value where the weight is not 0, else 0.
inline Vector where_nonzero(Vector weight, Vector value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(weight, _mm512_setzero_ps(), _CMP_NEQ_UQ), value);
}

// Of the lanes of two vectors, one after the other, those at even and those at odd places.
inline void split_pairs(Vector low, Vector high, Vector& even, Vector& odd) {
  const __m512i places =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even = _mm512_permutex2var_ps(low, places, high);
  odd = _mm512_permutex2var_ps(low, _mm512_add_epi32(places, _mm512_set1_epi32(1)), high);
}

inline Vector add_halves(Vector a, Vector b) {
  return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
}

inline Vector add_quarters(Vector a, Vector b, Vector c, Vector d) {
  return add_halves(add_halves(a, b), add_halves(c, d));
}

// to[i] = factor * the sum of the lanes of vectors[i].
MLX_H2O_INLINE void reduce(const Vector (&vectors)[kSums], float factor, float* to) {
  Vector quarter[4];  // [i]: in lane group g four parts of vectors[4 g + i]
  MLX_H2O_UNROLL
  for (int i = 0; i < 4; ++i) {
    quarter[i] = add_quarters(vectors[i], vectors[4 + i], vectors[8 + i], vectors[12 + i]);
  }
  const Vector low =
      _mm512_unpacklo_ps(quarter[0], quarter[1]) + _mm512_unpackhi_ps(quarter[0], quarter[1]);
  const Vector high =
      _mm512_unpacklo_ps(quarter[2], quarter[3]) + _mm512_unpackhi_ps(quarter[2], quarter[3]);
  const __m512d a = _mm512_castps_pd(low), b = _mm512_castps_pd(high);
  const Vector sums =
      _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  _mm512_storeu_ps(to, broadcast(factor) * sums);
}

// Elements bytes: scale * byte + bias.
template <int Elements>
MLX_H2O_INLINE void unpack_bytes(const uint8_t* from, float scale, float bias,
                                 Vector (&to)[Elements / kLanes]) {
  MLX_H2O_UNROLL
  for (int i = 0; i < Elements / kLanes; ++i) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * kLanes));
    const Vector level = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
    to[i] = multiply_add(level, broadcast(scale), broadcast(bias));
  }
}

// Four groups of eight codes, each from the lowest bit of its lane on.
template <int Bits>
MLX_H2O_INLINE __m128i four_groups(const uint8_t* from) {
  if constexpr (Bits == 4) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if constexpr (Bits == 2) {
    return _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  const __m128i words = _mm_maskz_loadu_epi32(0x7, from);
  return _mm_shuffle_epi8(words,
                          _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1));
}

template <int Bits>
MLX_H2O_INLINE __m256i eight_groups(const uint8_t* from) {
  if constexpr (Bits == 4) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  if constexpr (Bits == 2) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  // Three words to each half, then three bytes to each lane.
  const __m256i words = _mm256_permutevar8x32_epi32(_mm256_maskz_loadu_epi32(0x3f, from),
                                                    _mm256_setr_epi32(0, 1, 2, 2, 3, 4, 5, 5));
  return _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                        0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1)));
}

// Elements codes, in the order of code_order: scale * table[code] + bias. The table is in a
// register with a 4-bit index: a smaller table is repeated to fill it.
template <int Bits, int Elements>
MLX_H2O_INLINE void unpack_codes(const uint8_t* from, const float* table, float scale, float bias,
                                 Vector (&to)[Elements / kLanes]) {
  constexpr int kGroups = Elements / 8;
  const Vector levels = multiply_add(load(table), broadcast(scale), broadcast(bias));
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i words;  // the groups in order, repeated to fill the register
  if constexpr (Elements == 64) {
    words = _mm512_broadcast_i64x4(eight_groups<Bits>(from));
  } else {
    words = _mm512_broadcast_i32x4(four_groups<Bits>(from));
  }
  const __m512i shift =
      _mm512_mullo_epi32(_mm512_srli_epi32(lane, Elements == 64 ? 3 : 2), _mm512_set1_epi32(Bits));
  MLX_H2O_UNROLL
  for (int i = 0; i < Elements / kLanes; ++i) {
    const __m512i by = _mm512_add_epi32(shift, _mm512_set1_epi32(i * (kLanes / kGroups) * Bits));
    to[i] = _mm512_permutexvar_ps(_mm512_srlv_epi32(words, by), levels);
  }
}

#include "cpu/simd_partial.h"
