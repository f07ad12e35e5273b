"""Generated from metal/ by tools/package_kernels.py; do not edit."""

Pairs = tuple[tuple[str, str], ...]

FLAGS = (
    "bool_mask",
    "additive_mask",
    "sinks",
    "scores",
    "lse",
)

TEMPLATE: dict[str, tuple[str, ...]] = {
    "sdpa_vector": (
        "T",
        "D",
        "V",
        "NS",
        "CAUSAL",
    ),
}

# Name and condition, in order.
INPUTS: dict[str, Pairs] = {
    "sdpa_vector": (
        ("queries", ""),
        ("keys", ""),
        ("values", ""),
        ("mask", "bool_mask"),
        ("mask", "additive_mask"),
        ("sinks", "sinks"),
        ("params", ""),
    ),
}

# Name and condition, in order.
OUTPUTS: dict[str, Pairs] = {
    "sdpa_vector": (
        ("out", ""),
        ("scores", "scores"),
        ("lse", "lse"),
    ),
}

HEADER = """#if defined(__METAL_VERSION__)
#define H2O_THREADGROUP(T, name, count) threadgroup T name[count]
#endif
#define H2O_NEGATIVE_INFINITY (-metal::numeric_limits<float>::infinity())
#define H2O_LOWEST (-metal::numeric_limits<float>::max())
template <typename S>
inline int64_t h2o_offset(S strides, int batch, int head, int row, int element) {
  return batch * strides[0] + head * strides[1] + row * strides[2] + element * strides[3];
}
template <int E, typename P>
inline void h2o_load(P row, int64_t stride, thread float* values) {
  if (stride == 1) {
    for (int j = 0; j < E; j++) {
      values[j] = static_cast<float>(row[j]);
    }
  } else {
    for (int j = 0; j < E; j++) {
      values[j] = static_cast<float>(row[j * stride]);
    }
  }
}
template <int E>
inline float h2o_dot(thread const float* a, thread const float* b) {
  float sum = 0.0f;
  for (int j = 0; j < E; j++) {
    sum += a[j] * b[j];
  }
  return sum;
}
struct h2o_softmax {
  float maximum;
  float total;
};
inline h2o_softmax h2o_softmax_empty() {
  h2o_softmax state;
  state.maximum = H2O_LOWEST;
  state.total = 0.0f;
  return state;
}
inline void h2o_softmax_sink(thread h2o_softmax& state, float logit) {
  if (!(logit <= H2O_LOWEST)) {
    state.maximum = logit;
    state.total = 1.0f;
  }
}
template <int E>
inline void h2o_softmax_add(thread h2o_softmax& state, thread float* sums, float score,
                            thread const float* value) {
  const float maximum = metal::max(state.maximum, score);
  const float fade = metal::fast::exp(state.maximum - maximum);
  const float weight = metal::fast::exp(score - maximum);
  state.maximum = maximum;
  state.total = state.total * fade + weight;
  for (int j = 0; j < E; j++) {
    sums[j] = sums[j] * fade + weight * value[j];
  }
}
inline float h2o_softmax_share(float partial_maximum, float maximum) {
  return metal::fast::exp(partial_maximum - maximum);
}
inline float h2o_softmax_lse(float maximum, float total) {
  return total == 0.0f ? H2O_NEGATIVE_INFINITY : maximum + metal::precise::log(total);
}
"""

CUDA_SHIM = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifdef H2O_MAX_THREADS
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(H2O_MAX_THREADS)
#endif
typedef unsigned int uint;
namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
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
namespace fast {
__device__ inline float exp(float x) { return __expf(x); }
}
namespace precise {
__device__ inline float log(float x) { return ::logf(x); }
}
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
__device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
struct position {
  uint x, y, z;
};
__device__ inline uint thread_index() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
}
#define threadgroup_position_in_grid (metal::position{blockIdx.x, blockIdx.y, blockIdx.z})
#define threadgroups_per_grid (metal::position{gridDim.x, gridDim.y, gridDim.z})
#define thread_position_in_threadgroup (metal::position{threadIdx.x, threadIdx.y, threadIdx.z})
#define thread_index_in_simdgroup (metal::thread_index() % 32u)
#define simdgroup_index_in_threadgroup (metal::thread_index() / 32u)
#define device
#define constant
#define thread
#define threadgroup
#define H2O_THREADGROUP(T, name, count) __shared__ T name[count]
"""

# Condition and text, in order.
SEGMENTS: dict[str, Pairs] = {
    "sdpa_vector": (
        (
            "",
            """  constexpr int LANES = 32;
  constexpr int KEY_PART = D / LANES;
  constexpr int VALUE_PART = V / LANES;
  H2O_THREADGROUP(float, tile, NS * (LANES + 1));
  H2O_THREADGROUP(float, maxima, NS);
  H2O_THREADGROUP(float, totals, NS);
  const int lane = int(thread_index_in_simdgroup);
  const int group = int(simdgroup_index_in_threadgroup);
  const int batch_head = int(threadgroup_position_in_grid.x);
  const int query_index = int(threadgroup_position_in_grid.y);
  const int heads = queries_shape[1];
  const int query_count = queries_shape[2];
  const int key_count = keys_shape[2];
  const int batch = batch_head / heads;
  const int head = batch_head % heads;
  const int kv_head = head / (heads / keys_shape[1]);
  const int64_t row = int64_t(batch_head) * query_count + query_index;
  float query[KEY_PART];
  h2o_load<KEY_PART>(
      queries + h2o_offset(queries_strides, batch, head, query_index, lane * KEY_PART),
      queries_strides[3],
      query);
  for (int j = 0; j < KEY_PART; j++) {
    query[j] *= params[0];
  }
  float sums[VALUE_PART];
  for (int j = 0; j < VALUE_PART; j++) {
    sums[j] = 0.0f;
  }
  h2o_softmax state = h2o_softmax_empty();
""",
        ),
        (
            "sinks",
            """  if (group == 0) {
    h2o_softmax_sink(state, static_cast<float>(sinks[head * sinks_strides[0]]));
  }
""",
        ),
        (
            "",
            """  const int64_t key_start = h2o_offset(keys_strides, batch, kv_head, 0, lane * KEY_PART);
  const int64_t value_start = h2o_offset(values_strides, batch, kv_head, 0, lane * VALUE_PART);
""",
        ),
        (
            "bool_mask",
            """  const int64_t mask_start = h2o_offset(mask_strides, batch, head, query_index, 0);
""",
        ),
        (
            "additive_mask",
            """  const int64_t mask_start = h2o_offset(mask_strides, batch, head, query_index, 0);
""",
        ),
        (
            "",
            """  const int visible_end = CAUSAL ? key_count - query_count + query_index + 1 : key_count;
  for (int i = group; i < key_count; i += NS) {
    bool visible = i < visible_end;
""",
        ),
        (
            "bool_mask",
            """    visible = visible && mask[mask_start + i * mask_strides[3]];
""",
        ),
        (
            "additive_mask",
            """    const float bias = static_cast<float>(mask[mask_start + i * mask_strides[3]]);
    visible = visible && !(bias <= params[1]);
""",
        ),
        (
            "",
            """    if (visible) {
      float key[KEY_PART];
      float value[VALUE_PART];
      const int64_t key_row = key_start + i * keys_strides[2];
      const int64_t value_row = value_start + i * values_strides[2];
      h2o_load<KEY_PART>(keys + key_row, keys_strides[3], key);
      h2o_load<VALUE_PART>(values + value_row, values_strides[3], value);
      float score = metal::simd_sum(h2o_dot<KEY_PART>(query, key));
""",
        ),
        (
            "additive_mask",
            """      score += bias;
      state.total += bias - bias;
""",
        ),
        (
            "scores",
            """      if (lane == 0) {
        scores[row * key_count + i] = score;
      }
""",
        ),
        (
            "",
            """      h2o_softmax_add<VALUE_PART>(state, sums, score, value);
    }
""",
        ),
        (
            "scores",
            """    else if (lane == 0) {
      scores[row * key_count + i] = H2O_NEGATIVE_INFINITY;
    }
""",
        ),
        (
            "",
            """  }
  if (lane == 0) {
    maxima[group] = state.maximum;
    totals[group] = state.total;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const bool has_part = lane < NS;
  const float part_maximum = has_part ? maxima[lane] : H2O_LOWEST;
  const float maximum = metal::simd_max(part_maximum);
  const float share = has_part ? h2o_softmax_share(part_maximum, maximum) : 0.0f;
  const float total = metal::simd_sum(has_part ? totals[lane] * share : 0.0f);
  for (int j = 0; j < VALUE_PART; j++) {
    tile[group * (LANES + 1) + lane] = sums[j];
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int column = group; column < LANES; column += NS) {
      const float part = has_part ? tile[lane * (LANES + 1) + column] * share : 0.0f;
      const float sum = metal::simd_sum(part);
      if (lane == 0) {
        const float mean = total == 0.0f ? 0.0f : sum / total;
        out[row * V + column * VALUE_PART + j] = static_cast<T>(mean);
      }
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
""",
        ),
        (
            "lse",
            """  if (group == 0 && lane == 0) {
    lse[row] = h2o_softmax_lse(maximum, total);
  }
""",
        ),
    ),
}
