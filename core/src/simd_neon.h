// NEON of AArch64, always there on that machine. Included once, inside the namespace of NEON.

using Vector = float32x4_t;

constexpr int kLanes = 4;
constexpr int kRowTile = 4;  // 32 registers: 4 rows x 4 keys of sums, 4 keys, 1 query

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
