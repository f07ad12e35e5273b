// The Metal vocabulary for a type check by clang, which runs nothing. Address spaces
// are real here, so a pointer to the wrong one is an error. C++14 without any header,
// as in Metal.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef _Float16 half;
typedef half float16_t;
#if __clang_major__ >= 17
typedef __bf16 bfloat;
#else
typedef half bfloat;  // clang has no arithmetic type for it; address spaces are still checked
#endif
typedef bfloat bfloat16_t;

struct uint3 {
  uint x, y, z;
};

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define H2O_UNROLL _Pragma("clang loop unroll(full)")
#define H2O_THREADGROUP(T, name, count) static threadgroup T name[count]

template <typename To>
To as_type(float);

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

inline mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}

template <typename T>
struct numeric_limits;

template <>
struct numeric_limits<float> {
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float max() { return 3.402823466e+38f; }
};

namespace fast {
float exp(float);
}
namespace precise {
float exp(float);
float log(float);
float sqrt(float);
}  // namespace precise

float max(float, float);
int max(int, int);
float min(float, float);
int min(int, int);
float abs(float);

float simd_sum(float);
int simd_sum(int);
float simd_max(float);
int simd_max(int);
template <typename T>
T simd_broadcast(T, ushort);
template <typename T>
T simd_shuffle(T, ushort);
template <typename T>
T simd_shuffle_xor(T, ushort);

void threadgroup_barrier(mem_flags);

}  // namespace metal

// As in the preamble that MLX adds.
using namespace metal;
