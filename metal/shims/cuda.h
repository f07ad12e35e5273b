// The Metal vocabulary of the kernels on CUDA; comes before h2o.h in the header text of
// cuda_kernel.  NVRTC compiles it, so it includes no host header.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// MLX's generated kernel has no launch bounds; without them the compiler would use more
// registers than a group of 1024 threads can have.
#ifdef H2O_MAX_THREADS
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(H2O_MAX_THREADS, 1)
#endif

typedef unsigned short ushort;
typedef unsigned int uint;

template <typename To>
__device__ inline To as_type(float from) {
  return static_cast<To>(__float_as_uint(from));
}

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

__device__ inline mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}

template <typename T>
struct numeric_limits;

template <>
struct numeric_limits<float> {
  static __device__ float infinity() { return __int_as_float(0x7f800000); }
  static constexpr __device__ float max() { return 3.402823466e+38f; }
};

template <typename T>
__device__ inline T max(T a, T b) {
  return a < b ? b : a;
}

template <typename T>
__device__ inline T min(T a, T b) {
  return b < a ? b : a;
}

__device__ inline float abs(float x) { return ::fabsf(x); }

namespace fast {
__device__ inline float exp(float x) { return __expf(x); }
}  // namespace fast

namespace precise {
__device__ inline float exp(float x) { return ::expf(x); }
__device__ inline float log(float x) { return ::logf(x); }
__device__ inline float sqrt(float x) { return ::sqrtf(x); }
}  // namespace precise

// A warp is a simdgroup: 32 lanes, which all take part.
template <typename T>
__device__ inline T simd_sum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = x + __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

template <typename T>
__device__ inline T simd_max(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = metal::max(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

template <typename T>
__device__ inline T simd_shuffle(T x, ushort lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

__device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }

struct position {
  uint x, y, z;
};

__device__ inline uint thread_index() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

}  // namespace metal

// Metal passes these to the kernel; here the names are macros for expressions.
#define threadgroup_position_in_grid (metal::position{blockIdx.x, blockIdx.y, blockIdx.z})
#define threadgroups_per_grid (metal::position{gridDim.x, gridDim.y, gridDim.z})
#define thread_position_in_threadgroup (metal::position{threadIdx.x, threadIdx.y, threadIdx.z})
#define thread_index_in_simdgroup (metal::thread_index() % 32u)
#define simdgroup_index_in_threadgroup (metal::thread_index() / 32u)

// Address spaces are inferred on CUDA.
#define device
#define constant
#define thread
#define threadgroup
#define H2O_UNROLL _Pragma("unroll")
#define H2O_THREADGROUP(T, name, count) __shared__ T name[count]
