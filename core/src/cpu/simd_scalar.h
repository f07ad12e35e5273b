// The portable target: the compiler's own four-lane vectors, no intrinsics. Included once, inside
// the namespace of its target.

using Vector = float __attribute__((vector_size(16)));
using Bits = uint32_t __attribute__((vector_size(16)));

constexpr SimdTarget kTarget = SimdTarget::scalar;
constexpr int kLanes = 4;
constexpr int kSums = 8;          // the sums of one tile
constexpr int kRowTile = 2;       // rows of the largest tile
constexpr int kPackedRun = 32;    // elements of a packed row that are unpacked together
constexpr bool kLooksUp = false;  // affine codes of 4 bits are counted, not looked up

inline Vector broadcast(float value) { return Vector{value, value, value, value}; }

inline Vector load(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename Half>
inline Vector load(const Half* from) {
  return Vector{to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])};
}

inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }

inline void stream(float* to, Vector value) { store(to, value); }

inline void end_streams() {}

inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }

inline Vector maximum(Vector a, Vector b) { return a > b ? a : b; }

inline float sum(Vector value) { return (value[0] + value[2]) + (value[1] + value[3]); }

// value where x >= limit or x is NaN, else 0.
inline Vector zero_below(Vector x, Vector limit, Vector value) {
  return x < limit ? Vector{0, 0, 0, 0} : value;
}

// Reads the lanes as bits: (bits << 23) + the bits of 1.0f.
inline Vector exponent_from_low_bits(Vector value) {
  Bits bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits << 23) + 0x3f800000u;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// One bit for each lane of x that is at its limit, above it, or NaN.
inline uint32_t lanes_not_below(Vector x, Vector limit) {
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= x[i] < limit[i] ? 0u : 1u << i;
  return lanes;
}

// One bit for each lane that is not 0; NaN is not.
inline uint32_t nonzero_lanes(Vector value) {
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= value[i] != 0 ? 1u << i : 0u;
  return lanes;
}

// value where the weight is not 0, else 0.
inline Vector where_nonzero(Vector weight, Vector value) {
  return weight != 0 ? value : Vector{0, 0, 0, 0};
}

// Of the lanes of two vectors, one after the other, those at even and those at odd places.
inline void split_pairs(Vector low, Vector high, Vector& even, Vector& odd) {
  even = Vector{low[0], low[2], high[0], high[2]};
  odd = Vector{low[1], low[3], high[1], high[3]};
}

// to[i] = factor * the sum of the lanes of vectors[i].
MLX_H2O_INLINE void reduce(const Vector (&vectors)[kSums], float factor, float* to) {
  for (int i = 0; i < kSums; ++i) to[i] = factor * sum(vectors[i]);
}

// Elements bytes: scale * byte + bias.
template <int Elements>
MLX_H2O_INLINE void unpack_bytes(const uint8_t* from, float scale, float bias,
                                 Vector (&to)[Elements / kLanes]) {
  for (int i = 0; i < Elements / kLanes; ++i) {
    const uint8_t* bytes = from + i * kLanes;
    const Vector level = {static_cast<float>(bytes[0]), static_cast<float>(bytes[1]),
                          static_cast<float>(bytes[2]), static_cast<float>(bytes[3])};
    to[i] = multiply_add(level, broadcast(scale), broadcast(bias));
  }
}

// Elements 4-bit codes, in the order of code_order.
template <int Elements>
MLX_H2O_INLINE void unpack_nibbles(const uint8_t* from, float scale, float bias,
                                   Vector (&to)[Elements / kLanes]) {
  static_assert(Elements == 32);
  Bits words;
  std::memcpy(&words, from, sizeof words);
  for (int i = 0; i < Elements / kLanes; ++i) {
    const Vector level = __builtin_convertvector((words >> (4 * i)) & 15, Vector);
    to[i] = multiply_add(level, broadcast(scale), broadcast(bias));
  }
}

// Elements codes, in the order of code_order: scale * table[code] + bias.
template <int Bits, int Elements>
MLX_H2O_INLINE void unpack_codes(const uint8_t* from, const float* table, float scale, float bias,
                                 Vector (&to)[Elements / kLanes]) {
  static_assert(Elements == 32);
  uint32_t groups[kLanes] = {};  // eight codes each
  for (int lane = 0; lane < kLanes; ++lane) std::memcpy(&groups[lane], from + lane * Bits, Bits);
  for (int i = 0; i < Elements / kLanes; ++i) {
    Vector level;
    for (int lane = 0; lane < kLanes; ++lane) {
      level[lane] = table[groups[lane] >> (Bits * i) & ((1u << Bits) - 1)];
    }
    to[i] = multiply_add(level, broadcast(scale), broadcast(bias));
  }
}

#include "cpu/simd_partial.h"
