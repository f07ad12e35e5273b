// The types of elements. The two 16-bit float formats are converted without hardware help: every
// SIMD target rounds its output through these functions, so that targets differ only in the order
// of their sums.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace mlx_h2o::kernels {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// IEEE binary16, as stored.
struct Float16 {
  uint16_t bits;
};

/// The upper half of a binary32, as stored.
struct BFloat16 {
  uint16_t bits;
};

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }

inline float to_float(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t fraction = value.bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return from_bits(sign | to_bits(magnitude));
  }
  const uint32_t wide = exponent == 0x1fu ? 0xffu : exponent + 112;
  return from_bits(sign | (wide << 23) | (fraction << 13));
}

/// Rounds to nearest, ties to even; NaN stays NaN, too large values become infinity.
template <typename T>
T round_to(float value);

template <>
inline float round_to<float>(float value) {
  return value;
}

template <>
inline BFloat16 round_to<BFloat16>(float value) {
  const uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline Float16 round_to<Float16>(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 is the first to round past the largest half
    result = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal: rebias the exponent from 127 to 15
    result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else {  // subnormal: adding 0.5 leaves the rounded count of 2^-24 steps in the low bits
    result = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  }
  return {static_cast<uint16_t>(sign | result)};
}

enum class ElementType { float32, float16, bfloat16 };

/// Bytes of one element.
inline int64_t element_size(ElementType type) { return type == ElementType::float32 ? 4 : 2; }

/// Calls `use` with a value of the C++ type of the elements. Inlined, and so compiled for the SIMD
/// target of its caller.
template <typename Use>
inline __attribute__((always_inline)) void with_type(ElementType type, const Use& use) {
  switch (type) {
    case ElementType::float32:
      return use(0.0f);
    case ElementType::float16:
      return use(Float16{});
    case ElementType::bfloat16:
      return use(BFloat16{});
  }
}

}  // namespace mlx_h2o::kernels
