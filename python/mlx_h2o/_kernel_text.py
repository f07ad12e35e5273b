"""Generated from metal/ by tools/package_kernels.py; do not edit."""

Pairs = tuple[tuple[str, str], ...]

# Of each kernel its family, and what is always on in it.
KERNELS: dict[str, tuple[str, frozenset[str]]] = {
    "sdpa_vector": ("sdpa_vector", frozenset("keys values".split())),
    "sdpa_vector_2pass_1": ("sdpa_vector", frozenset("blocks keys values".split())),
    "sdpa_vector_quantized": ("sdpa_vector", frozenset("quantized keys values".split())),
    "sdpa_vector_2pass_1_quantized": ("sdpa_vector", frozenset("blocks quantized keys values".split())),
    "sdpa_vector_sparse_quantized": ("sdpa_vector", frozenset("quantized sparse keys values scores".split())),
    "sdpa_vector_sparse_keys_quantized": ("sdpa_vector", frozenset("blocks quantized sparse keys scores".split())),
    "sdpa_vector_sparse_values_quantized": ("sdpa_vector", frozenset("blocks quantized sparse values".split())),
    "sdpa_vector_2pass_2": ("sdpa_vector_2pass_2", frozenset("".split())),
    "add_mass": ("add_mass", frozenset("".split())),
    "keep_rows": ("keep_rows", frozenset("".split())),
    "encode_rows": ("encode_rows", frozenset("".split())),
}

# The other flags that matter to each kernel.
OWN_FLAGS: dict[str, tuple[str, ...]] = {
    "sdpa_vector": tuple("bool_mask additive_mask sinks scores lse row_bias".split()),
    "sdpa_vector_2pass_1": tuple("bool_mask additive_mask sinks scores row_bias".split()),
    "sdpa_vector_quantized": tuple("bool_mask additive_mask sinks scores lse row_bias dense_keys key_codes value_codes".split()),
    "sdpa_vector_2pass_1_quantized": tuple("bool_mask additive_mask sinks scores row_bias dense_keys key_codes value_codes".split()),
    "sdpa_vector_sparse_quantized": tuple("bool_mask additive_mask sinks lse skipped row_bias dense_keys key_codes value_codes".split()),
    "sdpa_vector_sparse_keys_quantized": tuple("bool_mask additive_mask sinks row_bias dense_keys key_codes".split()),
    "sdpa_vector_sparse_values_quantized": tuple("skipped value_codes".split()),
    "sdpa_vector_2pass_2": tuple("lse skipped".split()),
    "add_mass": tuple("".split()),
    "keep_rows": tuple("".split()),
    "encode_rows": tuple("".split()),
}

# Name and condition, in order.
TEMPLATE: dict[str, Pairs] = {
    "sdpa_vector": (
        ("T", "keys"),
        ("S", "quantized"),
        ("D", "keys"),
        ("V", "values"),
        ("KB", "quantized keys !dense_keys"),
        ("VB", "quantized values"),
        ("G", "quantized keys !dense_keys !key_codes"),
        ("G", "quantized values !value_codes"),
        ("NS", ""),
        ("CAUSAL", "keys"),
    ),
    "sdpa_vector_2pass_2": (
        ("T", ""),
        ("V", ""),
    ),
    "add_mass": (
        ("NS", ""),
    ),
    "keep_rows": (
        ("NS", ""),
    ),
    "encode_rows": (
        ("T", ""),
        ("D", ""),
        ("BITS", ""),
    ),
}

# Name and condition, in order.
INPUTS: dict[str, Pairs] = {
    "sdpa_vector": (
        ("queries", "keys"),
        ("keys", "!quantized"),
        ("keys", "quantized keys dense_keys"),
        ("values", "!quantized"),
        ("key_words", "quantized keys !dense_keys"),
        ("key_scales", "quantized keys !dense_keys"),
        ("key_biases", "quantized keys !dense_keys !key_codes"),
        ("key_levels", "quantized keys key_codes"),
        ("value_words", "quantized values"),
        ("value_scales", "quantized values"),
        ("value_biases", "quantized values !value_codes"),
        ("value_levels", "quantized values value_codes"),
        ("mask", "bool_mask keys"),
        ("mask", "additive_mask keys"),
        ("sinks", "sinks keys"),
        ("row_bias", "row_bias keys"),
        ("scores", "!keys"),
        ("partial_maxima", "!keys"),
        ("partial_totals", "!keys"),
        ("params", ""),
    ),
    "sdpa_vector_2pass_2": (
        ("partial_sums", ""),
        ("partial_maxima", ""),
        ("partial_totals", ""),
        ("partial_skipped", "skipped"),
    ),
    "add_mass": (
        ("importance", ""),
        ("scores", ""),
        ("lse", ""),
    ),
    "keep_rows": (
        ("scores", ""),
        ("positions", ""),
        ("recent_starts", ""),
        ("zones", ""),
    ),
    "encode_rows": (
        ("rows", ""),
        ("signs", ""),
        ("levels", ""),
    ),
}

# Name and condition, in order.
OUTPUTS: dict[str, Pairs] = {
    "sdpa_vector": (
        ("out", "!blocks"),
        ("partial_sums", "blocks values"),
        ("partial_maxima", "blocks keys"),
        ("partial_totals", "blocks keys"),
        ("scores", "scores keys"),
        ("lse", "!blocks lse"),
        ("skipped", "!blocks sparse skipped"),
        ("partial_skipped", "blocks sparse values skipped"),
    ),
    "sdpa_vector_2pass_2": (
        ("out", ""),
        ("lse", "lse"),
        ("skipped", "skipped"),
    ),
    "add_mass": (
        ("accumulated", ""),
    ),
    "keep_rows": (
        ("kept", ""),
    ),
    "encode_rows": (
        ("words", ""),
        ("norms", ""),
    ),
}

HEADER = """#if defined(__METAL_VERSION__)
#define H2O_THREADGROUP(T, name, count) threadgroup T name[count]
#define H2O_UNROLL _Pragma("clang loop unroll(full)")
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
template <int E, int BITS, typename W>
inline void h2o_load_fields(W words, int64_t word_stride, int first, thread uint32_t* fields) {
  constexpr int LENGTH = E * BITS;
  constexpr int WORDS = (LENGTH + 31) / 32;
  constexpr bool CROSSES = LENGTH % 32 != 0 && 32 % LENGTH != 0;
  const int first_bit = first * BITS;
  const int first_word = first_bit / 32;
  const int shift = first_bit % 32;
  uint32_t part[WORDS + 1];
  for (int k = 0; k < WORDS; k++) {
    part[k] = words[(first_word + k) * word_stride];
  }
  part[WORDS] = 0;
  if (CROSSES && first_word + WORDS <= (first_bit + LENGTH - 1) / 32) {
    part[WORDS] = words[(first_word + WORDS) * word_stride];
  }
  if (LENGTH % 32 != 0) {
    for (int k = 0; k < WORDS; k++) {
      part[k] = (part[k] >> shift) | ((part[k + 1] << 1) << (31 - shift));
    }
  }
  for (int j = 0; j < E; j++) {
    const int k = j * BITS / 32;
    const int offset = j * BITS % 32;
    uint32_t bits = part[k] >> offset;
    if (offset + BITS > 32) {
      bits |= part[k + 1] << (32 - offset);
    }
    fields[j] = bits & ((1u << BITS) - 1u);
  }
}
template <int E, int BITS, int GROUP, typename W, typename S, typename B>
inline void h2o_load_quantized(W words, int64_t word_stride, S scales, int64_t scale_stride,
                               B biases, int64_t bias_stride, int first, thread float* values) {
  uint32_t fields[E];
  h2o_load_fields<E, BITS>(words, word_stride, first, fields);
  const int near_group = first / GROUP;
  const int near_count = (near_group + 1) * GROUP - first;
  const int far_group = GROUP % E == 0 ? near_group : (first + E - 1) / GROUP;
  const float near_scale = static_cast<float>(scales[near_group * scale_stride]);
  const float near_bias = static_cast<float>(biases[near_group * bias_stride]);
  const float far_scale = static_cast<float>(scales[far_group * scale_stride]);
  const float far_bias = static_cast<float>(biases[far_group * bias_stride]);
  for (int j = 0; j < E; j++) {
    const float element = static_cast<float>(fields[j]);
    const bool is_near = GROUP % E == 0 || j < near_count;
    values[j] = (is_near ? near_scale : far_scale) * element + (is_near ? near_bias : far_bias);
  }
}
template <int E, int BITS, typename W, typename L>
inline void h2o_load_codes(W words, int64_t word_stride, L levels, float norm, int first,
                           thread float* values) {
  uint32_t fields[E];
  h2o_load_fields<E, BITS>(words, word_stride, first, fields);
  for (int j = 0; j < E; j++) {
    values[j] = norm * levels[fields[j]];
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
inline float h2o_softmax_weigh(thread h2o_softmax& state, thread float* sums, float score) {
  const float maximum = metal::max(state.maximum, score);
  const float fade = metal::fast::exp(state.maximum - maximum);
  const float weight = metal::fast::exp(score - maximum);
  state.maximum = maximum;
  state.total = state.total * fade + weight;
  for (int j = 0; j < E; j++) {
    sums[j] *= fade;
  }
  return weight;
}
inline void h2o_softmax_count(thread h2o_softmax& state, float score) {
  const float maximum = metal::max(state.maximum, score);
  const float fade = metal::fast::exp(state.maximum - maximum);
  state.total = state.total * fade + metal::fast::exp(score - maximum);
  state.maximum = maximum;
}
template <int E>
inline void h2o_add_row(thread float* sums, float weight, thread const float* value) {
  for (int j = 0; j < E; j++) {
    sums[j] += weight * value[j];
  }
}
struct h2o_merged {
  float maximum;
  float total;
  float share;
};
inline h2o_merged h2o_softmax_merge(h2o_softmax part) {
  h2o_merged all;
  all.maximum = metal::simd_max(part.maximum);
  all.share = metal::fast::exp(part.maximum - all.maximum);
  all.total = metal::simd_sum(part.total * all.share);
  return all;
}
inline float h2o_softmax_mean(float sum, float total) {
  return total == 0.0f ? 0.0f : sum / total;
}
inline float h2o_softmax_lse(float maximum, float total) {
  return total == 0.0f ? H2O_NEGATIVE_INFINITY : maximum + metal::precise::log(total);
}
struct h2o_retention {
  uint32_t upper;
  uint32_t lower;
};
inline h2o_retention h2o_retention_key(float score, int position, int slot, int sink_end,
                                       int recent_start) {
  const bool is_padding = position < 0;
  const bool is_protected = position < sink_end || position >= recent_start;
  const bool is_scored = !is_padding && !is_protected && score == score;
  const uint32_t kind = is_padding ? 0u : is_protected ? 3u : is_scored ? 2u : 1u;
  uint32_t ranked = 0u;
  if (is_scored) {
    const uint32_t bits = as_type<uint32_t>(score == 0.0f ? 0.0f : score);
    ranked = (bits >> 31) != 0u ? ~bits : bits | 0x80000000u;
  }
  const uint32_t place = 0x3FFFFFFFu - static_cast<uint32_t>(is_padding ? slot : position);
  h2o_retention key;
  key.upper = (kind << 30) | (ranked >> 2);
  key.lower = (ranked << 30) | place;
  return key;
}
"""

CUDA_SHIM = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
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
}
namespace precise {
__device__ inline float exp(float x) { return ::expf(x); }
__device__ inline float log(float x) { return ::logf(x); }
__device__ inline float sqrt(float x) { return ::sqrtf(x); }
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
#define H2O_UNROLL _Pragma("unroll")
#define H2O_THREADGROUP(T, name, count) __shared__ T name[count]
"""

# Text and condition, in order.
SEGMENTS: dict[str, Pairs] = {
    "sdpa_vector": (
        ("""  constexpr int LANES = 32;
""", ""),
        ("""  constexpr int KEY_PART = D / LANES;
  H2O_THREADGROUP(float, maxima, NS);
  H2O_THREADGROUP(float, totals, NS);
""", "keys"),
        ("""  constexpr int VALUE_PART = V / LANES;
  H2O_THREADGROUP(float, tile, NS * (LANES + 1));
""", "values"),
        ("""  const int lane = int(thread_index_in_simdgroup);
  const int group = int(simdgroup_index_in_threadgroup);
  const int batch_head = int(threadgroup_position_in_grid.x);
  const int query_index = int(threadgroup_position_in_grid.y);
""", ""),
        ("""  const int heads = queries_shape[1];
  const int query_count = queries_shape[2];
""", "keys"),
        ("""  const int key_count = keys_shape[2];
  const int kv_heads = keys_shape[1];
""", "keys quantized dense_keys"),
        ("""  const int key_count = key_words_shape[2];
  const int kv_heads = key_words_shape[1];
""", "keys quantized !dense_keys"),
        ("""  const int key_count = keys_shape[2];
  const int kv_heads = keys_shape[1];
""", "keys !quantized"),
        ("""  const int heads = scores_shape[1];
  const int query_count = scores_shape[2];
  const int key_count = scores_shape[3];
  const int kv_heads = value_words_shape[1];
""", "!keys"),
        ("""  const int batch = batch_head / heads;
  const int head = batch_head % heads;
  const int kv_head = head / (heads / kv_heads);
  const int64_t row = int64_t(batch_head) * query_count + query_index;
""", ""),
        ("""  const int block = int(threadgroup_position_in_grid.z);
  const int blocks = int(threadgroups_per_grid.z);
  const int first_key = block * NS + group;
  const int key_step = blocks * NS;
""", "blocks"),
        ("""  const int first_key = group;
  const int key_step = NS;
""", "!blocks"),
        ("""  float sums[VALUE_PART];
  for (int j = 0; j < VALUE_PART; j++) {
    sums[j] = 0.0f;
  }
""", "values"),
        ("""  const int64_t value_words_start = h2o_offset(value_words_strides, batch, kv_head, 0, 0);
  const int64_t value_scales_start = h2o_offset(value_scales_strides, batch, kv_head, 0, 0);
""", "values quantized"),
        ("""  const int64_t value_biases_start = h2o_offset(value_biases_strides, batch, kv_head, 0, 0);
""", "values quantized !value_codes"),
        ("""  const int64_t value_start = h2o_offset(values_strides, batch, kv_head, 0, lane * VALUE_PART);
""", "values !quantized"),
        ("""  float query[KEY_PART];
  h2o_load<KEY_PART>(
      queries + h2o_offset(queries_strides, batch, head, query_index, lane * KEY_PART),
      queries_strides[3],
      query);
  for (int j = 0; j < KEY_PART; j++) {
    query[j] *= params[0];
  }
  h2o_softmax state = h2o_softmax_empty();
""", "keys"),
        ("""  if (first_key == 0) {
    h2o_softmax_sink(state, static_cast<float>(sinks[head * sinks_strides[0]]));
  }
""", "keys sinks"),
        ("""  const int64_t key_start = h2o_offset(keys_strides, batch, kv_head, 0, lane * KEY_PART);
""", "keys quantized dense_keys"),
        ("""  const int64_t key_words_start = h2o_offset(key_words_strides, batch, kv_head, 0, 0);
  const int64_t key_scales_start = h2o_offset(key_scales_strides, batch, kv_head, 0, 0);
""", "keys quantized !dense_keys"),
        ("""  const int64_t key_biases_start = h2o_offset(key_biases_strides, batch, kv_head, 0, 0);
""", "keys quantized !dense_keys !key_codes"),
        ("""  const int64_t key_start = h2o_offset(keys_strides, batch, kv_head, 0, lane * KEY_PART);
""", "keys !quantized"),
        ("""  const int64_t mask_start = h2o_offset(mask_strides, batch, head, query_index, 0);
""", "keys bool_mask"),
        ("""  const int64_t mask_start = h2o_offset(mask_strides, batch, head, query_index, 0);
""", "keys additive_mask"),
        ("""  const int64_t row_bias_start = batch * row_bias_strides[0] + kv_head * row_bias_strides[1];
""", "keys row_bias"),
        ("""  const int visible_end = CAUSAL ? key_count - query_count + query_index + 1 : key_count;
  for (int i = first_key; i < key_count; i += key_step) {
    bool visible = i < visible_end;
""", "keys"),
        ("""    visible = visible && mask[mask_start + i * mask_strides[3]];
""", "keys bool_mask"),
        ("""    const float bias = static_cast<float>(mask[mask_start + i * mask_strides[3]]);
    visible = visible && !(bias <= params[1]);
""", "keys additive_mask"),
        ("""    const float own_bias = row_bias[row_bias_start + i * row_bias_strides[2]];
    visible = visible && !(own_bias <= H2O_LOWEST);
""", "keys row_bias"),
        ("""    if (!visible && lane == 0) {
      scores[row * key_count + i] = H2O_NEGATIVE_INFINITY;
    }
""", "keys scores"),
        ("""    if (visible) {
      float key[KEY_PART];
""", "keys"),
        ("""      const int64_t key_row = key_start + i * keys_strides[2];
      h2o_load<KEY_PART>(keys + key_row, keys_strides[3], key);
""", "keys quantized dense_keys"),
        ("""      h2o_load_codes<KEY_PART, KB>(
          key_words + (key_words_start + i * key_words_strides[2]), key_words_strides[3],
          key_levels, key_scales[key_scales_start + i * key_scales_strides[2]],
          lane * KEY_PART, key);
""", "keys quantized !dense_keys key_codes"),
        ("""      h2o_load_quantized<KEY_PART, KB, G>(
          key_words + (key_words_start + i * key_words_strides[2]), key_words_strides[3],
          key_scales + (key_scales_start + i * key_scales_strides[2]), key_scales_strides[3],
          key_biases + (key_biases_start + i * key_biases_strides[2]), key_biases_strides[3],
          lane * KEY_PART, key);
""", "keys quantized !dense_keys !key_codes"),
        ("""      const int64_t key_row = key_start + i * keys_strides[2];
      h2o_load<KEY_PART>(keys + key_row, keys_strides[3], key);
""", "keys !quantized"),
        ("""      float value[VALUE_PART];
""", "keys !sparse"),
        ("""      const int64_t value_row = value_start + i * values_strides[2];
      h2o_load<VALUE_PART>(values + value_row, values_strides[3], value);
""", "keys !sparse !quantized"),
        ("""      float score = metal::simd_sum(h2o_dot<KEY_PART>(query, key));
""", "keys"),
        ("""      score += bias;
      state.total += bias - bias;
""", "keys additive_mask"),
        ("""      score += own_bias;
      state.total += own_bias - own_bias;
""", "keys row_bias"),
        ("""      if (lane == 0) {
        scores[row * key_count + i] = score;
      }
""", "keys scores"),
        ("""      h2o_softmax_count(state, score);
""", "keys sparse"),
        ("""      const float weight = h2o_softmax_weigh<VALUE_PART>(state, sums, score);
""", "keys !sparse"),
        ("""      h2o_load_codes<VALUE_PART, VB>(
          value_words + (value_words_start + i * value_words_strides[2]), value_words_strides[3],
          value_levels, value_scales[value_scales_start + i * value_scales_strides[2]],
          lane * VALUE_PART, value);
""", "keys !sparse quantized value_codes"),
        ("""      h2o_load_quantized<VALUE_PART, VB, G>(
          value_words + (value_words_start + i * value_words_strides[2]), value_words_strides[3],
          value_scales + (value_scales_start + i * value_scales_strides[2]),
          value_scales_strides[3],
          value_biases + (value_biases_start + i * value_biases_strides[2]),
          value_biases_strides[3],
          lane * VALUE_PART, value);
""", "keys !sparse quantized !value_codes"),
        ("""      h2o_add_row<VALUE_PART>(sums, weight, value);
""", "keys !sparse"),
        ("""    }
  }
  if (lane == 0) {
    maxima[group] = state.maximum;
    totals[group] = state.total;
  }
""", "keys"),
        ("""  metal::threadgroup_barrier(metal::mem_flags::mem_device | metal::mem_flags::mem_threadgroup);
""", "keys sparse"),
        ("""  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
""", "keys !sparse"),
        ("""  const bool has_part = lane < NS;
  h2o_softmax part = h2o_softmax_empty();
  if (has_part) {
    part.maximum = maxima[lane];
    part.total = totals[lane];
  }
  const h2o_merged merged = h2o_softmax_merge(part);
""", "keys"),
        ("""  const bool has_part = lane < NS;
  h2o_softmax part = h2o_softmax_empty();
  if (lane < blocks) {
    part.maximum = partial_maxima[row * blocks + lane];
    part.total = partial_totals[row * blocks + lane];
  }
  const h2o_merged merged = h2o_softmax_merge(part);
  const float maximum = metal::simd_shuffle(part.maximum, ushort(block));
  const float share = metal::simd_shuffle(merged.share, ushort(block));
""", "!keys"),
        ("""  const float maximum = merged.maximum;
  const float share = 1.0f;
""", "sparse values keys"),
        ("""  const float least = params[2] * merged.total;
""", "sparse values"),
        ("""  H2O_THREADGROUP(float, counts, NS);
  float count = 0.0f;
""", "sparse values skipped"),
        ("""  for (int start = first_key; start < key_count; start += LANES * key_step) {
    const int own_key = start + lane * key_step;
    const float score =
        own_key < key_count ? scores[row * key_count + own_key] : H2O_NEGATIVE_INFINITY;
    float own_weight = 0.0f;
    if (!(score <= H2O_LOWEST)) {
      own_weight = metal::fast::exp(score - maximum);
      if (own_weight * share < least) {
        own_weight = 0.0f;
""", "sparse values"),
        ("""        count += 1.0f;
""", "sparse values skipped"),
        ("""      }
    }
    for (int from = 0, i = start; from < LANES && i < key_count; from++, i += key_step) {
      const float weight = metal::simd_shuffle(own_weight, ushort(from));
      if (weight == 0.0f) {
        continue;
      }
      float value[VALUE_PART];
""", "sparse values"),
        ("""      h2o_load_codes<VALUE_PART, VB>(
          value_words + (value_words_start + i * value_words_strides[2]), value_words_strides[3],
          value_levels, value_scales[value_scales_start + i * value_scales_strides[2]],
          lane * VALUE_PART, value);
""", "sparse values value_codes"),
        ("""      h2o_load_quantized<VALUE_PART, VB, G>(
          value_words + (value_words_start + i * value_words_strides[2]), value_words_strides[3],
          value_scales + (value_scales_start + i * value_scales_strides[2]),
          value_scales_strides[3],
          value_biases + (value_biases_start + i * value_biases_strides[2]),
          value_biases_strides[3],
          lane * VALUE_PART, value);
""", "sparse values !value_codes"),
        ("""      h2o_add_row<VALUE_PART>(sums, weight, value);
    }
  }
""", "sparse values"),
        ("""  const float group_count = metal::simd_sum(count);
  if (lane == 0) {
    counts[group] = group_count;
  }
""", "sparse values skipped"),
        ("""  H2O_UNROLL
  for (int j = 0; j < VALUE_PART; j++) {
    tile[group * (LANES + 1) + lane] = sums[j];
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int column = group; column < LANES; column += NS) {
""", "values"),
        ("""      const float column_part = has_part ? tile[lane * (LANES + 1) + column] : 0.0f;
""", "values sparse"),
        ("""      const float column_part = has_part ? tile[lane * (LANES + 1) + column] * merged.share : 0.0f;
""", "values !sparse"),
        ("""      const float sum = metal::simd_sum(column_part);
      if (lane == 0) {
""", "values"),
        ("""        partial_sums[(row * blocks + block) * V + column * VALUE_PART + j] = sum;
""", "values blocks"),
        ("""        const float mean = h2o_softmax_mean(sum, merged.total);
        out[row * V + column * VALUE_PART + j] = static_cast<T>(mean);
""", "values !blocks"),
        ("""      }
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
""", "values"),
        ("""  const float skipped_rows = metal::simd_sum(has_part ? counts[lane] : 0.0f);
  if (group == 0 && lane == 0) {
""", "values skipped sparse"),
        ("""    partial_skipped[row * blocks + block] = skipped_rows / float(key_count);
""", "values skipped sparse blocks"),
        ("""    skipped[row] = skipped_rows / float(key_count);
""", "values skipped sparse !blocks"),
        ("""  }
""", "values skipped sparse"),
        ("""  if (group == 0 && lane == 0) {
    partial_maxima[row * blocks + block] = merged.maximum;
    partial_totals[row * blocks + block] = merged.total;
  }
""", "blocks keys"),
        ("""  if (group == 0 && lane == 0) {
    lse[row] = h2o_softmax_lse(merged.maximum, merged.total);
  }
""", "!blocks lse"),
    ),
    "sdpa_vector_2pass_2": (
        ("""  constexpr int LANES = 32;
  constexpr int PARTS = V / LANES;
  const int lane = int(thread_index_in_simdgroup);
  const int64_t row = int64_t(threadgroup_position_in_grid.x) / PARTS;
  const int column = int(threadgroup_position_in_grid.x) % PARTS * LANES + lane;
  const int blocks = partial_maxima_shape[3];
  h2o_softmax part = h2o_softmax_empty();
  if (lane < blocks) {
    part.maximum = partial_maxima[row * blocks + lane];
    part.total = partial_totals[row * blocks + lane];
  }
  const h2o_merged merged = h2o_softmax_merge(part);
  float sum = 0.0f;
  for (int b = 0; b < blocks; b++) {
    const float share = metal::simd_shuffle(merged.share, ushort(b));
    sum += share * partial_sums[(row * blocks + b) * V + column];
  }
  out[row * V + column] = static_cast<T>(h2o_softmax_mean(sum, merged.total));
""", ""),
        ("""  const float rows_skipped =
      metal::simd_sum(lane < blocks ? partial_skipped[row * blocks + lane] : 0.0f);
  if (column == 0) {
    skipped[row] = rows_skipped;
  }
""", "skipped"),
        ("""  if (column == 0) {
    lse[row] = h2o_softmax_lse(merged.maximum, merged.total);
  }
""", "lse"),
    ),
    "add_mass": (
        ("""  constexpr int LANES = 32;
  const int head = int(threadgroup_position_in_grid.y);
  const int heads = importance_shape[1];
  const int row_count = importance_shape[2];
  const int group = int(threadgroup_position_in_grid.x) * NS + int(simdgroup_index_in_threadgroup);
  const int row = group * LANES + int(thread_index_in_simdgroup);
  if (row >= row_count) {
    return;
  }
  float mass = importance[(head / heads) * importance_strides[0] +
                          (head % heads) * importance_strides[1] + row * importance_strides[2]];
  const int scored = scores_shape[3];
  if (row < scored) {
    mass = mass == mass ? mass : 0.0f;
    const int queries = scores_shape[1] * scores_shape[2] / heads;
    const int64_t first = int64_t(head) * queries;
    for (int64_t query = first; query < first + queries; query++) {
      const float total = lse[query] == H2O_NEGATIVE_INFINITY ? 0.0f : lse[query];
      mass += metal::precise::exp(scores[query * scored + row] - total);
    }
  }
  accumulated[int64_t(head) * row_count + row] = mass;
""", ""),
    ),
    "keep_rows": (
        ("""  constexpr int LANES = 32;
  H2O_THREADGROUP(int, counts, NS);
  const int lane = int(thread_index_in_simdgroup);
  const int group = int(simdgroup_index_in_threadgroup);
  const int head_count = positions_shape[1];
  const int row_count = positions_shape[2];
  const int batch = int(threadgroup_position_in_grid.x) / head_count;
  const int head = int(threadgroup_position_in_grid.x) % head_count;
  const int64_t scores_start = batch * scores_strides[0] + head * scores_strides[1];
  const int64_t positions_start = batch * positions_strides[0] + head * positions_strides[1];
  const int sink_end = zones[0];
  const int recent_start = recent_starts[batch * recent_starts_strides[0]];
  const int dropped = zones[1];
  const int kept_count = row_count - dropped;
  uint32_t upper = 0;
  uint32_t lower = 0;
  for (int round = 0; round < 64; round++) {
    const bool is_upper = round < 32;
    const uint32_t bit = 1u << (31 - round % 32);
    const uint32_t candidate = (is_upper ? upper : lower) | bit;
    int below = 0;
    for (int row = group * LANES + lane; row < row_count; row += NS * LANES) {
      const h2o_retention key = h2o_retention_key(
          scores[scores_start + row * scores_strides[2]],
          positions[positions_start + row * positions_strides[2]], row, sink_end, recent_start);
      const bool is_below = is_upper
          ? key.upper < candidate
          : key.upper < upper || (key.upper == upper && key.lower < candidate);
      below += is_below ? 1 : 0;
    }
    below = metal::simd_sum(below);
    if (lane == 0) {
      counts[group] = below;
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    const int all_below = metal::simd_sum(lane < NS ? counts[lane] : 0);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (all_below <= dropped) {
      if (is_upper) {
        upper = candidate;
      } else {
        lower = candidate;
      }
    }
  }
  const int part = (row_count + NS * LANES - 1) / (NS * LANES) * LANES;
  const int first = group * part;
  for (int pass = 0; pass < 2; pass++) {
    int before = 0;
    if (pass == 1) {
      before = metal::simd_sum(lane < group ? counts[lane] : 0);
    }
    int found = 0;
    for (int start = first; start < first + part; start += LANES) {
      const int row = start + lane;
      int stays = 0;
      if (row < row_count) {
        const h2o_retention key = h2o_retention_key(
            scores[scores_start + row * scores_strides[2]],
            positions[positions_start + row * positions_strides[2]], row, sink_end, recent_start);
        stays = key.upper > upper || (key.upper == upper && key.lower >= lower) ? 1 : 0;
      }
      int so_far = stays;
      for (int distance = 1; distance < LANES; distance *= 2) {
        const int other = metal::simd_shuffle(so_far, ushort(metal::max(lane - distance, 0)));
        so_far += lane >= distance ? other : 0;
      }
      if (pass == 1 && stays == 1) {
        const int place = before + found + so_far - 1;
        kept[int64_t(threadgroup_position_in_grid.x) * kept_count + place] = uint32_t(row);
      }
      found += metal::simd_shuffle(so_far, ushort(LANES - 1));
    }
    if (pass == 0) {
      if (lane == 0) {
        counts[group] = found;
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
  }
""", ""),
    ),
    "encode_rows": (
        ("""  constexpr int LANES = 32;
  constexpr int E = D / LANES;
  constexpr int WORDS = D * BITS / 32;
  constexpr float LEAST_NORM = 1e-8f;
  H2O_THREADGROUP(ushort, codes, D);
  const int lane = int(thread_index_in_simdgroup);
  const int heads = rows_shape[1];
  const int count = rows_shape[2];
  const int64_t row = int64_t(threadgroup_position_in_grid.x);
  const int batch = int(row / (int64_t(heads) * count));
  const int head = int(row / count % heads);
  const int token = int(row % count);
  float elements[E];
  h2o_load<E>(
      rows + h2o_offset(rows_strides, batch, head, token, lane * E), rows_strides[3], elements);
  const float length = metal::precise::sqrt(metal::simd_sum(h2o_dot<E>(elements, elements)));
  for (int j = 0; j < E; j++) {
    elements[j] = elements[j] / metal::max(length, LEAST_NORM) * signs[lane * E + j];
  }
  H2O_UNROLL
  for (int bit = 1; bit < E; bit *= 2) {
    H2O_UNROLL
    for (int j = 0; j < E; j++) {
      if ((j & bit) == 0) {
        const float sum = elements[j] + elements[j + bit];
        elements[j + bit] = elements[j] - elements[j + bit];
        elements[j] = sum;
      }
    }
  }
  for (int bit = 1; bit < LANES; bit *= 2) {
    for (int j = 0; j < E; j++) {
      const float other = metal::simd_shuffle(elements[j], ushort(lane ^ bit));
      elements[j] = (lane & bit) == 0 ? elements[j] + other : other - elements[j];
    }
  }
  const float scale = 1.0f / metal::precise::sqrt(float(D));
  ushort exceeded[E];
  for (int j = 0; j < E; j++) {
    exceeded[j] = 0;
  }
  for (int k = 0; k + 1 < (1 << BITS); k++) {
    const float mean = (levels[k] + levels[k + 1]) / 2.0f;
    for (int j = 0; j < E; j++) {
      exceeded[j] += elements[j] * scale > mean ? 1 : 0;
    }
  }
  for (int j = 0; j < E; j++) {
    elements[j] = levels[exceeded[j]];
  }
  const float coded = metal::precise::sqrt(metal::simd_sum(h2o_dot<E>(elements, elements)));
  if (lane == 0) {
    norms[row] = length / coded;
  }
  for (int j = 0; j < E; j++) {
    codes[lane * E + j] = exceeded[j];
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int word = lane; word < WORDS; word += LANES) {
    uint32_t filled = 0;
    for (int j = word * 32 / BITS; j * BITS < (word + 1) * 32; j++) {
      const int shift = j * BITS - word * 32;
      const uint32_t code = codes[j];
      filled |= shift < 0 ? code >> -shift : code << shift;
    }
    words[row * WORDS + word] = filled;
  }
""", ""),
    ),
}
