// The portable target: the compiler's own four-lane vectors, no intrinsics. Included once, inside
// the namespace of its target.

using Vector = float __attribute__((vector_size(16)));
using Bits = uint32_t __attribute__((vector_size(16)));

constexpr int kLanes = 4;
constexpr int kRowTile = 2;

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
