// The Metal vocabulary of the kernels as C++20, for the emulator (g++ 12 or clang 15
// and later).  Kernel text comes between host_begin.h and host_end.h.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "emulator.h"

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using half = _Float16;
using float16_t = half;

// As in Metal: converts to float implicitly, and from float only by a cast.
struct bfloat {
  uint16_t bits;

  bfloat() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T> || std::is_same_v<T, half>>>
  explicit bfloat(T value) : bits(nearest(static_cast<float>(value))) {}
  operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }

 private:
  static uint16_t nearest(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    if (std::isnan(value)) {
      return static_cast<uint16_t>((word >> 16) | 0x40);
    }
    return static_cast<uint16_t>((word + 0x7FFF + (word >> 16 & 1)) >> 16);
  }
};
using bfloat16_t = bfloat;

struct uint3 {
  uint x, y, z;
};

template <class To, class From>
inline To as_type(From from) {
  return std::bit_cast<To>(from);
}

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

inline mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}

template <class T>
struct numeric_limits : std::numeric_limits<T> {};

#ifdef H2O_LOOSE_NAN
// The worst NaN behaviour that Metal allows, for kernels that rely on more.
inline float max(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? a + b : (a < b ? b : a);
}
namespace fast {
inline float exp(float x) { return std::isnan(x) ? 1.0f : std::exp(x); }
}  // namespace fast
#else
namespace fast {
inline float exp(float x) { return std::exp(x); }
}  // namespace fast
#endif

namespace precise {
inline float exp(float x) { return std::exp(x); }
inline float log(float x) { return std::log(x); }
inline float sqrt(float x) { return std::sqrt(x); }
}  // namespace precise

template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}

inline float abs(float x) { return std::fabs(x); }

// Collectives record their place in the kernel, so that the emulator notices lanes in
// different collectives.
using emulator::Collective;
using emulator::Site;

template <class T>
inline T simd_sum(T x, Site site = Site::current()) {
  return emulator::running->combine<Collective::sum>(x, site);
}

template <class T>
inline T simd_max(T x, Site site = Site::current()) {
  return emulator::running->combine<Collective::maximum>(x, site);
}

template <class T>
inline T simd_broadcast(T x, ushort lane, Site site = Site::current()) {
  return emulator::running->exchange(x, lane, site);
}

template <class T>
inline T simd_shuffle(T x, ushort lane, Site site = Site::current()) {
  return emulator::running->exchange(x, lane, site);
}

template <class T>
inline T simd_shuffle_xor(T x, ushort mask, Site site = Site::current()) {
  return emulator::running->exchange(x, emulator::running->lane() ^ mask, site);
}

inline void threadgroup_barrier(mem_flags, Site site = Site::current()) {
  emulator::running->barrier(site);
}

}  // namespace metal

#define H2O_UNROLL

// The same memory for every thread of the threadgroup.
#define H2O_THREADGROUP(T, name, count) \
  T(&name)                              \
  [count] = *static_cast<T(*)[count]>(emulator::running->allocate(#name, sizeof(T) * (count)))
