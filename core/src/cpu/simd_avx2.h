// AVX2 with FMA and F16C. Included once, inside the namespace and the target region of AVX2.

using Vector = __m256;

constexpr SimdTarget kTarget = SimdTarget::avx2;
constexpr int kLanes = 8;
constexpr int kSums = 8;          // of 16 registers: the sums of one tile
constexpr int kRowTile = 2;       // rows of the largest tile
constexpr int kPackedRun = 32;    // elements of a packed row that are unpacked together
constexpr bool kLooksUp = false;  // affine codes of 4 bits are counted, not looked up

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

// A store to an aligned address that bypasses the caches.
inline void stream(float* to, Vector value) { _mm256_stream_ps(to, value); }

// Makes streaming stores visible before later stores.
inline void end_streams() { _mm_sfence(); }

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

// One bit for each lane of x that is at its limit, above it, or NaN.
inline uint32_t lanes_not_below(Vector x, Vector limit) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ)));
}

// One bit for each lane that is not 0; NaN is not.
inline uint32_t nonzero_lanes(Vector value) {
  return static_cast<uint32_t>(
      _mm256_movemask_ps(_mm256_cmp_ps(value, _mm256_setzero_ps(), _CMP_NEQ_UQ)));
}

// value where the weight is not 0, else 0.
inline Vector where_nonzero(Vector weight, Vector value) {
  return _mm256_and_ps(_mm256_cmp_ps(weight, _mm256_setzero_ps(), _CMP_NEQ_UQ), value);
}

// Of the lanes of two vectors, one after the other, those at even and those at odd places.
inline void split_pairs(Vector low, Vector high, Vector& even, Vector& odd) {
  const Vector a = _mm256_permute2f128_ps(low, high, 0x20);
  const Vector b = _mm256_permute2f128_ps(low, high, 0x31);
  even = _mm256_shuffle_ps(a, b, 0x88);
  odd = _mm256_shuffle_ps(a, b, 0xdd);
}

// to[i] = factor * the sum of the lanes of vectors[i].
MLX_H2O_INLINE void reduce(const Vector (&vectors)[kSums], float factor, float* to) {
  const Vector a = _mm256_hadd_ps(_mm256_hadd_ps(vectors[0], vectors[1]),
                                  _mm256_hadd_ps(vectors[2], vectors[3]));
  const Vector b = _mm256_hadd_ps(_mm256_hadd_ps(vectors[4], vectors[5]),
                                  _mm256_hadd_ps(vectors[6], vectors[7]));
  const Vector sums = _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
  _mm256_storeu_ps(to, broadcast(factor) * sums);
}

inline int load_int(const uint8_t* from) {
  int value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Elements bytes: scale * byte + bias.
template <int Elements>
MLX_H2O_INLINE void unpack_bytes(const uint8_t* from, float scale, float bias,
                                 Vector (&to)[Elements / kLanes]) {
  MLX_H2O_UNROLL
  for (int i = 0; i < Elements / kLanes; ++i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * kLanes));
    const Vector level = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    to[i] = multiply_add(level, broadcast(scale), broadcast(bias));
  }
}

// Elements 4-bit codes, in the order of code_order.
template <int Elements>
MLX_H2O_INLINE void unpack_nibbles(const uint8_t* from, float scale, float bias,
                                   Vector (&to)[Elements / kLanes]) {
  static_assert(Elements == 32);
  const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256i words = _mm256_srlv_epi32(_mm256_broadcastsi128_si256(four),
                                          _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
  MLX_H2O_UNROLL
  for (int i = 0; i < Elements / kLanes; ++i) {
    const __m256i level = _mm256_and_si256(_mm256_srli_epi32(words, 8 * i), _mm256_set1_epi32(15));
    to[i] = multiply_add(_mm256_cvtepi32_ps(level), broadcast(scale), broadcast(bias));
  }
}

// Elements codes, in the order of code_order: scale * table[code] + bias. Tables of 2 and 3 bits
// fill the first 8 of the 16 numbers, 2 bits twice.
template <int Bits, int Elements>
MLX_H2O_INLINE void unpack_codes(const uint8_t* from, const float* table, float scale, float bias,
                                 Vector (&to)[Elements / kLanes]) {
  static_assert(Elements == 32);
  __m128i four;  // groups of eight codes, one in each lane
  if constexpr (Bits == 4) {
    four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  } else if constexpr (Bits == 3) {
    const __m128i bytes = _mm_insert_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)),
                                           load_int(from + 8), 2);
    four = _mm_shuffle_epi8(bytes,
                            _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1));
  } else {
    four = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  const __m256i words = _mm256_srlv_epi32(_mm256_broadcastsi128_si256(four),
                                          _mm256_setr_epi32(0, 0, 0, 0, Bits, Bits, Bits, Bits));
  const Vector low = multiply_add(load(table), broadcast(scale), broadcast(bias));
  [[maybe_unused]] const Vector high =
      multiply_add(load(table + 8), broadcast(scale), broadcast(bias));
  MLX_H2O_UNROLL
  for (int i = 0; i < Elements / kLanes; ++i) {
    const __m256i code = _mm256_srli_epi32(words, 2 * Bits * i);
    to[i] = _mm256_permutevar8x32_ps(low, code);
    if constexpr (Bits == 4) {  // the fourth bit chooses the half of the table
      const Vector sign = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
      to[i] = _mm256_blendv_ps(to[i], _mm256_permutevar8x32_ps(high, code), sign);
    }
  }
}

#include "cpu/simd_partial.h"
