/* Generated from metal/ by tools/package_kernels.py; do not edit. */
/* clang-format off */
#ifndef MLX_H2O_KERNEL_TEXT_H
#define MLX_H2O_KERNEL_TEXT_H

#include <stddef.h>

/* Text, or a buffer, that exists when its condition holds: flags separated by
   spaces, all of which must be on, or off where a flag has a "!" before it. */
typedef struct {
    const char* condition;
    const char* text;
} mlx_h2o_kernel_segment;

typedef struct {
    const char* name;
    const char* condition;
} mlx_h2o_kernel_buffer;

typedef struct {
    const char* name;
    const char* const* template_names;
    size_t template_count;
    const mlx_h2o_kernel_buffer* inputs;
    size_t input_count;
    const mlx_h2o_kernel_buffer* outputs;
    size_t output_count;
    const mlx_h2o_kernel_segment* segments;
    size_t segment_count;
} mlx_h2o_kernel_text;

static const char* const mlx_h2o_kernel_flags[] = {
    "bool_mask",
    "additive_mask",
    "sinks",
    "scores",
    "lse",
};

static const mlx_h2o_kernel_segment mlx_h2o_kernel_header[] = {
    {"",
     "#if defined(__METAL_VERSION__)\n"
     "#define H2O_THREADGROUP(T, name, count) threadgroup T name[count]\n"
     "#endif\n"
     "#define H2O_NEGATIVE_INFINITY (-metal::numeric_limits<float>::infinity())\n"
     "#define H2O_LOWEST (-metal::numeric_limits<float>::max())\n"
     "template <typename S>\n"
     "inline int64_t h2o_offset(S strides, int batch, int head, int row, int element) {\n"
     "  return batch * strides[0] + head * strides[1] + row * strides[2] + element * strides[3];\n"
     "}\n"
     "template <int E, typename P>\n"
     "inline void h2o_load(P row, int64_t stride, thread float* values) {\n"
     "  if (stride == 1) {\n"
     "    for (int j = 0; j < E; j++) {\n"
     "      values[j] = static_cast<float>(row[j]);\n"
     "    }\n"
     "  } else {\n"
     "    for (int j = 0; j < E; j++) {\n"
     "      values[j] = static_cast<float>(row[j * stride]);\n"
     "    }\n"
     "  }\n"
     "}\n"
     "template <int E>\n"
     "inline float h2o_dot(thread const float* a, thread const float* b) {\n"
     "  float sum = 0.0f;\n"
     "  for (int j = 0; j < E; j++) {\n"
     "    sum += a[j] * b[j];\n"
     "  }\n"
     "  return sum;\n"
     "}\n"
     "struct h2o_softmax {\n"
     "  float maximum;\n"
     "  float total;\n"
     "};\n"
     "inline h2o_softmax h2o_softmax_empty() {\n"
     "  h2o_softmax state;\n"
     "  state.maximum = H2O_LOWEST;\n"
     "  state.total = 0.0f;\n"
     "  return state;\n"
     "}\n"
     "inline void h2o_softmax_sink(thread h2o_softmax& state, float logit) {\n"
     "  if (!(logit <= H2O_LOWEST)) {\n"
     "    state.maximum = logit;\n"
     "    state.total = 1.0f;\n"
     "  }\n"
     "}\n"
     "template <int E>\n"
     "inline void h2o_softmax_add(thread h2o_softmax& state, thread float* sums, float score,\n"
     "                            thread const float* value) {\n"
     "  const float maximum = metal::max(state.maximum, score);\n"
     "  const float fade = metal::fast::exp(state.maximum - maximum);\n"
     "  const float weight = metal::fast::exp(score - maximum);\n"
     "  state.maximum = maximum;\n"
     "  state.total = state.total * fade + weight;\n"
     "  for (int j = 0; j < E; j++) {\n"
     "    sums[j] = sums[j] * fade + weight * value[j];\n"
     "  }\n"
     "}\n"
     "inline float h2o_softmax_share(float partial_maximum, float maximum) {\n"
     "  return metal::fast::exp(partial_maximum - maximum);\n"
     "}\n"
     "inline float h2o_softmax_lse(float maximum, float total) {\n"
     "  return total == 0.0f ? H2O_NEGATIVE_INFINITY : maximum + metal::precise::log(total);\n"
     "}\n"},
};

static const char* const mlx_h2o_sdpa_vector_template[] = {
    "T",
    "D",
    "V",
    "NS",
    "CAUSAL",
};

static const mlx_h2o_kernel_buffer mlx_h2o_sdpa_vector_inputs[] = {
    {"queries", ""},
    {"keys", ""},
    {"values", ""},
    {"mask", "bool_mask"},
    {"mask", "additive_mask"},
    {"sinks", "sinks"},
    {"params", ""},
};

static const mlx_h2o_kernel_buffer mlx_h2o_sdpa_vector_outputs[] = {
    {"out", ""},
    {"scores", "scores"},
    {"lse", "lse"},
};

static const mlx_h2o_kernel_segment mlx_h2o_sdpa_vector_segments[] = {
    {"",
     "  constexpr int LANES = 32;\n"
     "  constexpr int KEY_PART = D / LANES;\n"
     "  constexpr int VALUE_PART = V / LANES;\n"
     "  H2O_THREADGROUP(float, tile, NS * (LANES + 1));\n"
     "  H2O_THREADGROUP(float, maxima, NS);\n"
     "  H2O_THREADGROUP(float, totals, NS);\n"
     "  const int lane = int(thread_index_in_simdgroup);\n"
     "  const int group = int(simdgroup_index_in_threadgroup);\n"
     "  const int batch_head = int(threadgroup_position_in_grid.x);\n"
     "  const int query_index = int(threadgroup_position_in_grid.y);\n"
     "  const int heads = queries_shape[1];\n"
     "  const int query_count = queries_shape[2];\n"
     "  const int key_count = keys_shape[2];\n"
     "  const int batch = batch_head / heads;\n"
     "  const int head = batch_head % heads;\n"
     "  const int kv_head = head / (heads / keys_shape[1]);\n"
     "  const int64_t row = int64_t(batch_head) * query_count + query_index;\n"
     "  float query[KEY_PART];\n"
     "  h2o_load<KEY_PART>(\n"
     "      queries + h2o_offset(queries_strides, batch, head, query_index, lane * KEY_PART),\n"
     "      queries_strides[3],\n"
     "      query);\n"
     "  for (int j = 0; j < KEY_PART; j++) {\n"
     "    query[j] *= params[0];\n"
     "  }\n"
     "  float sums[VALUE_PART];\n"
     "  for (int j = 0; j < VALUE_PART; j++) {\n"
     "    sums[j] = 0.0f;\n"
     "  }\n"
     "  h2o_softmax state = h2o_softmax_empty();\n"},
    {"sinks",
     "  if (group == 0) {\n"
     "    h2o_softmax_sink(state, static_cast<float>(sinks[head * sinks_strides[0]]));\n"
     "  }\n"},
    {"",
     "  const int64_t key_start = h2o_offset(keys_strides, batch, kv_head, 0, lane * KEY_PART);\n"
     "  const int64_t value_start = h2o_offset(values_strides, batch, kv_head, 0, lane * VALUE_PART);\n"},
    {"bool_mask",
     "  const int64_t mask_start = h2o_offset(mask_strides, batch, head, query_index, 0);\n"},
    {"additive_mask",
     "  const int64_t mask_start = h2o_offset(mask_strides, batch, head, query_index, 0);\n"},
    {"",
     "  const int visible_end = CAUSAL ? key_count - query_count + query_index + 1 : key_count;\n"
     "  for (int i = group; i < key_count; i += NS) {\n"
     "    bool visible = i < visible_end;\n"},
    {"bool_mask",
     "    visible = visible && mask[mask_start + i * mask_strides[3]];\n"},
    {"additive_mask",
     "    const float bias = static_cast<float>(mask[mask_start + i * mask_strides[3]]);\n"
     "    visible = visible && !(bias <= params[1]);\n"},
    {"",
     "    if (visible) {\n"
     "      float key[KEY_PART];\n"
     "      float value[VALUE_PART];\n"
     "      const int64_t key_row = key_start + i * keys_strides[2];\n"
     "      const int64_t value_row = value_start + i * values_strides[2];\n"
     "      h2o_load<KEY_PART>(keys + key_row, keys_strides[3], key);\n"
     "      h2o_load<VALUE_PART>(values + value_row, values_strides[3], value);\n"
     "      float score = metal::simd_sum(h2o_dot<KEY_PART>(query, key));\n"},
    {"additive_mask",
     "      score += bias;\n"
     "      state.total += bias - bias;\n"},
    {"scores",
     "      if (lane == 0) {\n"
     "        scores[row * key_count + i] = score;\n"
     "      }\n"},
    {"",
     "      h2o_softmax_add<VALUE_PART>(state, sums, score, value);\n"
     "    }\n"},
    {"scores",
     "    else if (lane == 0) {\n"
     "      scores[row * key_count + i] = H2O_NEGATIVE_INFINITY;\n"
     "    }\n"},
    {"",
     "  }\n"
     "  if (lane == 0) {\n"
     "    maxima[group] = state.maximum;\n"
     "    totals[group] = state.total;\n"
     "  }\n"
     "  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
     "  const bool has_part = lane < NS;\n"
     "  const float part_maximum = has_part ? maxima[lane] : H2O_LOWEST;\n"
     "  const float maximum = metal::simd_max(part_maximum);\n"
     "  const float share = has_part ? h2o_softmax_share(part_maximum, maximum) : 0.0f;\n"
     "  const float total = metal::simd_sum(has_part ? totals[lane] * share : 0.0f);\n"
     "  for (int j = 0; j < VALUE_PART; j++) {\n"
     "    tile[group * (LANES + 1) + lane] = sums[j];\n"
     "    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
     "    for (int column = group; column < LANES; column += NS) {\n"
     "      const float part = has_part ? tile[lane * (LANES + 1) + column] * share : 0.0f;\n"
     "      const float sum = metal::simd_sum(part);\n"
     "      if (lane == 0) {\n"
     "        const float mean = total == 0.0f ? 0.0f : sum / total;\n"
     "        out[row * V + column * VALUE_PART + j] = static_cast<T>(mean);\n"
     "      }\n"
     "    }\n"
     "    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
     "  }\n"},
    {"lse",
     "  if (group == 0 && lane == 0) {\n"
     "    lse[row] = h2o_softmax_lse(maximum, total);\n"
     "  }\n"},
};

static const mlx_h2o_kernel_text mlx_h2o_sdpa_vector_text = {
    "sdpa_vector",
    mlx_h2o_sdpa_vector_template,
    sizeof(mlx_h2o_sdpa_vector_template) / sizeof(mlx_h2o_sdpa_vector_template[0]),
    mlx_h2o_sdpa_vector_inputs,
    sizeof(mlx_h2o_sdpa_vector_inputs) / sizeof(mlx_h2o_sdpa_vector_inputs[0]),
    mlx_h2o_sdpa_vector_outputs,
    sizeof(mlx_h2o_sdpa_vector_outputs) / sizeof(mlx_h2o_sdpa_vector_outputs[0]),
    mlx_h2o_sdpa_vector_segments,
    sizeof(mlx_h2o_sdpa_vector_segments) / sizeof(mlx_h2o_sdpa_vector_segments[0]),
};

#endif
