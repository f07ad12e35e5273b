// NEON of AArch64, always there on that machine. Included once, inside the namespace of NEON.

using Vector = float32x4_t;

constexpr SimdTarget kTarget = SimdTarget::neon;
constexpr int kLanes = 4;
constexpr int kSums = 16;         // of 32 registers: the sums of one tile
constexpr int kRowTile = 4;       // rows of the largest tile
constexpr int kPackedRun = 32;    // elements of a packed row that are unpacked together
constexpr bool kLooksUp = false;  // affine codes of 4 bits are counted, not looked up

inline Vector broadcast(float value) { return vdupq_n_f32(value); }

inline Vector load(const float* from) { return vld1q_f32(from); }

inline Vector load(const Float16* from) {
  uint16x4_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}

inline Vector load(const BFloat16* from) {
  uint16x4_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
}

inline void store(float* to, Vector value) { vst1q_f32(to, value); }

inline void stream(float* to, Vector value) { store(to, value); }

inline void end_streams() {}

inline Vector multiply_add(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }

inline Vector maximum(Vector a, Vector b) { return vmaxq_f32(a, b); }

inline float sum(Vector value) { return vaddvq_f32(value); }

// value where x >= limit or x is NaN, else 0.
inline Vector zero_below(Vector x, Vector limit, Vector value) {
  const uint32x4_t below = vcltq_f32(x, limit);
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), below));
}

// Reads the lanes as bits: (bits << 23) + the bits of 1.0f.
inline Vector exponent_from_low_bits(Vector value) {
  const uint32x4_t bits = vshlq_n_u32(vreinterpretq_u32_f32(value), 23);
  return vreinterpretq_f32_u32(vaddq_u32(bits, vdupq_n_u32(0x3f800000u)));
}

// One bit for each lane of x that is at its limit, above it, or NaN.
inline uint32_t lanes_not_below(Vector x, Vector limit) {
  const uint32x4_t bit = {1, 2, 4, 8};
  return vaddvq_u32(vbicq_u32(bit, vcltq_f32(x, limit)));
}

// One bit for each lane that is not 0; NaN is not.
inline uint32_t nonzero_lanes(Vector value) {
  const uint32x4_t bit = {1, 2, 4, 8};
  return vaddvq_u32(vbicq_u32(bit, vceqzq_f32(value)));
}

// value where the weight is not 0, else 0.
inline Vector where_nonzero(Vector weight, Vector value) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vceqzq_f32(weight)));
}

// Of the lanes of two vectors, one after the other, those at even and those at odd places.
inline void split_pairs(Vector low, Vector high, Vector& even, Vector& odd) {
  even = vuzp1q_f32(low, high);
  odd = vuzp2q_f32(low, high);
}

// to[i] = factor * the sum of the lanes of vectors[i].
MLX_H2O_INLINE void reduce(const Vector (&vectors)[kSums], float factor, float* to) {
  MLX_H2O_UNROLL
  for (int i = 0; i < kSums; i += 4) {
    const Vector sums = vpaddq_f32(vpaddq_f32(vectors[i], vectors[i + 1]),
                                   vpaddq_f32(vectors[i + 2], vectors[i + 3]));
    vst1q_f32(to + i, vmulq_n_f32(sums, factor));
  }
}

// Elements bytes: scale * byte + bias.
template <int Elements>
MLX_H2O_INLINE void unpack_bytes(const uint8_t* from, float scale, float bias,
                                 Vector (&to)[Elements / kLanes]) {
  MLX_H2O_UNROLL
  for (int i = 0; i < Elements / kLanes; i += 2) {
    const uint16x8_t wide = vmovl_u8(vld1_u8(from + i * kLanes));
    const Vector low = vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
    const Vector high = vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)));
    to[i] = multiply_add(low, broadcast(scale), broadcast(bias));
    to[i + 1] = multiply_add(high, broadcast(scale), broadcast(bias));
  }
}

// Elements 4-bit codes, in the order of code_order.
template <int Elements>
MLX_H2O_INLINE void unpack_nibbles(const uint8_t* from, float scale, float bias,
                                   Vector (&to)[Elements / kLanes]) {
  static_assert(Elements == 32);
  uint32x4_t words;
  std::memcpy(&words, from, sizeof words);
  MLX_H2O_UNROLL
  for (int i = 0; i < Elements / kLanes; ++i) {
    const uint32x4_t level = vandq_u32(vshlq_u32(words, vdupq_n_s32(-4 * i)), vdupq_n_u32(15));
    to[i] = multiply_add(vcvtq_f32_u32(level), broadcast(scale), broadcast(bias));
  }
}

// Elements codes, in the order of code_order: scale * table[code] + bias.
template <int Bits, int Elements>
MLX_H2O_INLINE void unpack_codes(const uint8_t* from, const float* table, float scale, float bias,
                                 Vector (&to)[Elements / kLanes]) {
  static_assert(Elements == 32);
  uint8_t bytes[16] = {};
  std::memcpy(bytes, from, 4 * Bits);
  uint32x4_t words;  // groups of eight codes, one in each lane
  if constexpr (Bits == 4) {
    words = vreinterpretq_u32_u8(vld1q_u8(bytes));
  } else if constexpr (Bits == 3) {
    constexpr uint8_t kPlaces[16] = {0, 1, 2, 15, 3, 4, 5, 15, 6, 7, 8, 15, 9, 10, 11, 15};
    words = vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(bytes), vld1q_u8(kPlaces)));
  } else {
    words = vmovl_u16(vreinterpret_u16_u8(vld1_u8(bytes)));
  }
  uint8x16x4_t levels;  // the table as bytes
  for (int i = 0; i < 4; ++i) {
    const Vector four = multiply_add(load(table + 4 * i), broadcast(scale), broadcast(bias));
    levels.val[i] = vreinterpretq_u8_f32(four);
  }
  const uint32x4_t mask = vdupq_n_u32((1u << Bits) - 1);
  MLX_H2O_UNROLL
  for (int i = 0; i < Elements / kLanes; ++i) {
    const uint32x4_t code = vandq_u32(vshlq_u32(words, vdupq_n_s32(-Bits * i)), mask);
    // The four bytes of the level: 4 * code + 0, 1, 2, 3.
    const uint32x4_t places = vmlaq_n_u32(vdupq_n_u32(0x03020100u), code, 0x04040404u);
    to[i] = vreinterpretq_f32_u8(vqtbl4q_u8(levels, vreinterpretq_u8_u32(places)));
  }
}

#include "cpu/simd_partial.h"
