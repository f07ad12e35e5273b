// Regions of a file that are compiled for one SIMD target each. Regions instead of compiler flags,
// so that every build system compiles a file in the same way. Only a kernel's own headers may be
// inside a region, so that no shared inline function is compiled for its target.
#pragma once

// The vectors of the processor; MLX_H2O_SCALAR disables them, as on any other processor.
#if defined(__x86_64__) && !defined(MLX_H2O_SCALAR)
#define MLX_H2O_X86
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(MLX_H2O_SCALAR)
#define MLX_H2O_ARM
#include <arm_neon.h>
#endif

// GCC considers a function that only prefetches free of effects, and drops calls of it.
#define MLX_H2O_INLINE inline __attribute__((always_inline))

#define MLX_H2O_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define MLX_H2O_UNROLL MLX_H2O_PRAGMA(clang loop unroll(full))
#define MLX_H2O_BEGIN_TARGET(features) \
  MLX_H2O_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define MLX_H2O_END_TARGET MLX_H2O_PRAGMA(clang attribute pop)
#else
#define MLX_H2O_UNROLL MLX_H2O_PRAGMA(GCC unroll 16)
#define MLX_H2O_BEGIN_TARGET(features) \
  MLX_H2O_PRAGMA(GCC push_options) MLX_H2O_PRAGMA(GCC target(features))
#define MLX_H2O_END_TARGET MLX_H2O_PRAGMA(GCC pop_options)
#endif

#define MLX_H2O_AVX2 "avx2,fma,f16c"
#define MLX_H2O_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
