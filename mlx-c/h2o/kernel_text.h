/* Generated from metal/ by tools/package_kernels.py; do not edit. */
/* clang-format off */
#ifndef MLX_H2O_KERNEL_TEXT_H
#define MLX_H2O_KERNEL_TEXT_H

#include <stddef.h>

/* Text, or a buffer, that exists when its condition holds: flags and traits
   separated by spaces, all of which must be on, or off where there is a "!". */
typedef struct {
    const char* condition;
    const char* text;
} mlx_h2o_kernel_segment;

typedef struct {
    const char* name;
    const char* condition;
} mlx_h2o_kernel_buffer;

/* `always_on` are its traits, and some flags, separated by spaces; `own_flags`
   are the other flags that matter to it. */
typedef struct {
    const char* name;
    const char* always_on;
    const char* own_flags;
    const mlx_h2o_kernel_buffer* template_arguments;
    size_t template_count;
    const mlx_h2o_kernel_buffer* inputs;
    size_t input_count;
    const mlx_h2o_kernel_buffer* outputs;
    size_t output_count;
    const mlx_h2o_kernel_segment* segments;
    size_t segment_count;
} mlx_h2o_kernel_text;

static const mlx_h2o_kernel_segment mlx_h2o_kernel_header[] = {
    {"",
     "#if defined(__METAL_VERSION__)\n"
     "#define H2O_THREADGROUP(T, name, count) threadgroup T name[count]\n"
     "#define H2O_UNROLL _Pragma(\"clang loop unroll(full)\")\n"
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
     "template <int E, int BITS, typename W>\n"
     "inline void h2o_load_fields(W words, int64_t word_stride, int first, thread uint32_t* fields) {\n"
     "  constexpr int LENGTH = E * BITS;\n"
     "  constexpr int WORDS = (LENGTH + 31) / 32;\n"
     "  constexpr bool CROSSES = LENGTH % 32 != 0 && 32 % LENGTH != 0;\n"
     "  const int first_bit = first * BITS;\n"
     "  const int first_word = first_bit / 32;\n"
     "  const int shift = first_bit % 32;\n"
     "  uint32_t part[WORDS + 1];\n"
     "  for (int k = 0; k < WORDS; k++) {\n"
     "    part[k] = words[(first_word + k) * word_stride];\n"
     "  }\n"
     "  part[WORDS] = 0;\n"
     "  if (CROSSES && first_word + WORDS <= (first_bit + LENGTH - 1) / 32) {\n"
     "    part[WORDS] = words[(first_word + WORDS) * word_stride];\n"
     "  }\n"
     "  if (LENGTH % 32 != 0) {\n"
     "    for (int k = 0; k < WORDS; k++) {\n"
     "      part[k] = (part[k] >> shift) | ((part[k + 1] << 1) << (31 - shift));\n"
     "    }\n"
     "  }\n"
     "  for (int j = 0; j < E; j++) {\n"
     "    const int k = j * BITS / 32;\n"
     "    const int offset = j * BITS % 32;\n"
     "    uint32_t bits = part[k] >> offset;\n"
     "    if (offset + BITS > 32) {\n"
     "      bits |= part[k + 1] << (32 - offset);\n"
     "    }\n"
     "    fields[j] = bits & ((1u << BITS) - 1u);\n"
     "  }\n"
     "}\n"
     "template <int E, int BITS, int GROUP, typename W, typename S, typename B>\n"
     "inline void h2o_load_quantized(W words, int64_t word_stride, S scales, int64_t scale_stride,\n"
     "                               B biases, int64_t bias_stride, int first, thread float* values) {\n"
     "  uint32_t fields[E];\n"
     "  h2o_load_fields<E, BITS>(words, word_stride, first, fields);\n"
     "  const int near_group = first / GROUP;\n"
     "  const int near_count = (near_group + 1) * GROUP - first;\n"
     "  const int far_group = GROUP % E == 0 ? near_group : (first + E - 1) / GROUP;\n"
     "  const float near_scale = static_cast<float>(scales[near_group * scale_stride]);\n"
     "  const float near_bias = static_cast<float>(biases[near_group * bias_stride]);\n"
     "  const float far_scale = static_cast<float>(scales[far_group * scale_stride]);\n"
     "  const float far_bias = static_cast<float>(biases[far_group * bias_stride]);\n"
     "  for (int j = 0; j < E; j++) {\n"
     "    const float element = static_cast<float>(fields[j]);\n"
     "    const bool is_near = GROUP % E == 0 || j < near_count;\n"
     "    values[j] = (is_near ? near_scale : far_scale) * element + (is_near ? near_bias : far_bias);\n"
     "  }\n"
     "}\n"
     "template <int E, int BITS, typename W, typename L>\n"
     "inline void h2o_load_codes(W words, int64_t word_stride, L levels, float norm, int first,\n"
     "                           thread float* values) {\n"
     "  uint32_t fields[E];\n"
     "  h2o_load_fields<E, BITS>(words, word_stride, first, fields);\n"
     "  for (int j = 0; j < E; j++) {\n"
     "    values[j] = norm * levels[fields[j]];\n"
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
     "inline float h2o_softmax_weigh(thread h2o_softmax& state, thread float* sums, float score) {\n"},
    {"",
     "  const float maximum = metal::max(state.maximum, score);\n"
     "  const float fade = metal::fast::exp(state.maximum - maximum);\n"
     "  const float weight = metal::fast::exp(score - maximum);\n"
     "  state.maximum = maximum;\n"
     "  state.total = state.total * fade + weight;\n"
     "  for (int j = 0; j < E; j++) {\n"
     "    sums[j] *= fade;\n"
     "  }\n"
     "  return weight;\n"
     "}\n"
     "inline void h2o_softmax_count(thread h2o_softmax& state, float score) {\n"
     "  const float maximum = metal::max(state.maximum, score);\n"
     "  const float fade = metal::fast::exp(state.maximum - maximum);\n"
     "  state.total = state.total * fade + metal::fast::exp(score - maximum);\n"
     "  state.maximum = maximum;\n"
     "}\n"
     "template <int E>\n"
     "inline void h2o_add_row(thread float* sums, float weight, thread const float* value) {\n"
     "  for (int j = 0; j < E; j++) {\n"
     "    sums[j] += weight * value[j];\n"
     "  }\n"
     "}\n"
     "struct h2o_merged {\n"
     "  float maximum;\n"
     "  float total;\n"
     "  float share;\n"
     "};\n"
     "inline h2o_merged h2o_softmax_merge(h2o_softmax part) {\n"
     "  h2o_merged all;\n"
     "  all.maximum = metal::simd_max(part.maximum);\n"
     "  all.share = metal::fast::exp(part.maximum - all.maximum);\n"
     "  all.total = metal::simd_sum(part.total * all.share);\n"
     "  return all;\n"
     "}\n"
     "inline float h2o_softmax_mean(float sum, float total) {\n"
     "  return total == 0.0f ? 0.0f : sum / total;\n"
     "}\n"
     "inline float h2o_softmax_lse(float maximum, float total) {\n"
     "  return total == 0.0f ? H2O_NEGATIVE_INFINITY : maximum + metal::precise::log(total);\n"
     "}\n"
     "struct h2o_retention {\n"
     "  uint32_t upper;\n"
     "  uint32_t lower;\n"
     "};\n"
     "inline h2o_retention h2o_retention_key(float score, int position, int slot, int sink_end,\n"
     "                                       int recent_start) {\n"
     "  const bool is_padding = position < 0;\n"
     "  const bool is_protected = position < sink_end || position >= recent_start;\n"
     "  const bool is_scored = !is_padding && !is_protected && score == score;\n"
     "  const uint32_t kind = is_padding ? 0u : is_protected ? 3u : is_scored ? 2u : 1u;\n"
     "  uint32_t ranked = 0u;\n"
     "  if (is_scored) {\n"
     "    const uint32_t bits = as_type<uint32_t>(score == 0.0f ? 0.0f : score);\n"
     "    ranked = (bits >> 31) != 0u ? ~bits : bits | 0x80000000u;\n"
     "  }\n"
     "  const uint32_t place = 0x3FFFFFFFu - static_cast<uint32_t>(is_padding ? slot : position);\n"
     "  h2o_retention key;\n"
     "  key.upper = (kind << 30) | (ranked >> 2);\n"
     "  key.lower = (ranked << 30) | place;\n"
     "  return key;\n"
     "}\n"},
};

static const mlx_h2o_kernel_buffer mlx_h2o_sdpa_vector_template[] = {
    {"T", "keys"},
    {"S", "quantized"},
    {"D", "keys"},
    {"V", "values"},
    {"KB", "quantized keys !dense_keys"},
    {"VB", "quantized values"},
    {"G", "quantized keys !dense_keys !key_codes"},
    {"G", "quantized values !value_codes"},
    {"NS", ""},
    {"CAUSAL", "keys"},
};

static const mlx_h2o_kernel_buffer mlx_h2o_sdpa_vector_inputs[] = {
    {"queries", "keys"},
    {"keys", "!quantized"},
    {"keys", "quantized keys dense_keys"},
    {"values", "!quantized"},
    {"key_words", "quantized keys !dense_keys"},
    {"key_scales", "quantized keys !dense_keys"},
    {"key_biases", "quantized keys !dense_keys !key_codes"},
    {"key_levels", "quantized keys key_codes"},
    {"value_words", "quantized values"},
    {"value_scales", "quantized values"},
    {"value_biases", "quantized values !value_codes"},
    {"value_levels", "quantized values value_codes"},
    {"mask", "bool_mask keys"},
    {"mask", "additive_mask keys"},
    {"sinks", "sinks keys"},
    {"row_bias", "row_bias keys"},
    {"scores", "!keys"},
    {"partial_maxima", "!keys"},
    {"partial_totals", "!keys"},
    {"params", ""},
};

static const mlx_h2o_kernel_buffer mlx_h2o_sdpa_vector_outputs[] = {
    {"out", "!blocks"},
    {"partial_sums", "blocks values"},
    {"partial_maxima", "blocks keys"},
    {"partial_totals", "blocks keys"},
    {"scores", "scores keys"},
    {"lse", "!blocks lse"},
    {"skipped", "!blocks sparse skipped"},
    {"partial_skipped", "blocks sparse values skipped"},
};

static const mlx_h2o_kernel_segment mlx_h2o_sdpa_vector_segments[] = {
    {"",
     "  constexpr int LANES = 32;\n"},
    {"keys",
     "  constexpr int KEY_PART = D / LANES;\n"
     "  H2O_THREADGROUP(float, maxima, NS);\n"
     "  H2O_THREADGROUP(float, totals, NS);\n"},
    {"values",
     "  constexpr int VALUE_PART = V / LANES;\n"
     "  H2O_THREADGROUP(float, tile, NS * (LANES + 1));\n"},
    {"",
     "  const int lane = int(thread_index_in_simdgroup);\n"
     "  const int group = int(simdgroup_index_in_threadgroup);\n"
     "  const int batch_head = int(threadgroup_position_in_grid.x);\n"
     "  const int query_index = int(threadgroup_position_in_grid.y);\n"},
    {"keys",
     "  const int heads = queries_shape[1];\n"
     "  const int query_count = queries_shape[2];\n"},
    {"keys quantized dense_keys",
     "  const int key_count = keys_shape[2];\n"
     "  const int kv_heads = keys_shape[1];\n"},
    {"keys quantized !dense_keys",
     "  const int key_count = key_words_shape[2];\n"
     "  const int kv_heads = key_words_shape[1];\n"},
    {"keys !quantized",
     "  const int key_count = keys_shape[2];\n"
     "  const int kv_heads = keys_shape[1];\n"},
    {"!keys",
     "  const int heads = scores_shape[1];\n"
     "  const int query_count = scores_shape[2];\n"
     "  const int key_count = scores_shape[3];\n"
     "  const int kv_heads = value_words_shape[1];\n"},
    {"",
     "  const int batch = batch_head / heads;\n"
     "  const int head = batch_head % heads;\n"
     "  const int kv_head = head / (heads / kv_heads);\n"
     "  const int64_t row = int64_t(batch_head) * query_count + query_index;\n"},
    {"blocks",
     "  const int block = int(threadgroup_position_in_grid.z);\n"
     "  const int blocks = int(threadgroups_per_grid.z);\n"
     "  const int first_key = block * NS + group;\n"
     "  const int key_step = blocks * NS;\n"},
    {"!blocks",
     "  const int first_key = group;\n"
     "  const int key_step = NS;\n"},
    {"values",
     "  float sums[VALUE_PART];\n"
     "  for (int j = 0; j < VALUE_PART; j++) {\n"
     "    sums[j] = 0.0f;\n"
     "  }\n"},
    {"values quantized",
     "  const int64_t value_words_start = h2o_offset(value_words_strides, batch, kv_head, 0, 0);\n"
     "  const int64_t value_scales_start = h2o_offset(value_scales_strides, batch, kv_head, 0, 0);\n"},
    {"values quantized !value_codes",
     "  const int64_t value_biases_start = h2o_offset(value_biases_strides, batch, kv_head, 0, 0);\n"},
    {"values !quantized",
     "  const int64_t value_start = h2o_offset(values_strides, batch, kv_head, 0, lane * VALUE_PART);\n"},
    {"keys",
     "  float query[KEY_PART];\n"
     "  h2o_load<KEY_PART>(\n"
     "      queries + h2o_offset(queries_strides, batch, head, query_index, lane * KEY_PART),\n"
     "      queries_strides[3],\n"
     "      query);\n"
     "  for (int j = 0; j < KEY_PART; j++) {\n"
     "    query[j] *= params[0];\n"
     "  }\n"
     "  h2o_softmax state = h2o_softmax_empty();\n"},
    {"keys sinks",
     "  if (first_key == 0) {\n"
     "    h2o_softmax_sink(state, static_cast<float>(sinks[head * sinks_strides[0]]));\n"
     "  }\n"},
    {"keys quantized dense_keys",
     "  const int64_t key_start = h2o_offset(keys_strides, batch, kv_head, 0, lane * KEY_PART);\n"},
    {"keys quantized !dense_keys",
     "  const int64_t key_words_start = h2o_offset(key_words_strides, batch, kv_head, 0, 0);\n"
     "  const int64_t key_scales_start = h2o_offset(key_scales_strides, batch, kv_head, 0, 0);\n"},
    {"keys quantized !dense_keys !key_codes",
     "  const int64_t key_biases_start = h2o_offset(key_biases_strides, batch, kv_head, 0, 0);\n"},
    {"keys !quantized",
     "  const int64_t key_start = h2o_offset(keys_strides, batch, kv_head, 0, lane * KEY_PART);\n"},
    {"keys bool_mask",
     "  const int64_t mask_start = h2o_offset(mask_strides, batch, head, query_index, 0);\n"},
    {"keys additive_mask",
     "  const int64_t mask_start = h2o_offset(mask_strides, batch, head, query_index, 0);\n"},
    {"keys row_bias",
     "  const int64_t row_bias_start = batch * row_bias_strides[0] + kv_head * row_bias_strides[1];\n"},
    {"keys",
     "  const int visible_end = CAUSAL ? key_count - query_count + query_index + 1 : key_count;\n"
     "  for (int i = first_key; i < key_count; i += key_step) {\n"
     "    bool visible = i < visible_end;\n"},
    {"keys bool_mask",
     "    visible = visible && mask[mask_start + i * mask_strides[3]];\n"},
    {"keys additive_mask",
     "    const float bias = static_cast<float>(mask[mask_start + i * mask_strides[3]]);\n"
     "    visible = visible && !(bias <= params[1]);\n"},
    {"keys row_bias",
     "    const float own_bias = row_bias[row_bias_start + i * row_bias_strides[2]];\n"
     "    visible = visible && !(own_bias <= H2O_LOWEST);\n"},
    {"keys scores",
     "    if (!visible && lane == 0) {\n"
     "      scores[row * key_count + i] = H2O_NEGATIVE_INFINITY;\n"
     "    }\n"},
    {"keys",
     "    if (visible) {\n"
     "      float key[KEY_PART];\n"},
    {"keys quantized dense_keys",
     "      const int64_t key_row = key_start + i * keys_strides[2];\n"
     "      h2o_load<KEY_PART>(keys + key_row, keys_strides[3], key);\n"},
    {"keys quantized !dense_keys key_codes",
     "      h2o_load_codes<KEY_PART, KB>(\n"
     "          key_words + (key_words_start + i * key_words_strides[2]), key_words_strides[3],\n"
     "          key_levels, key_scales[key_scales_start + i * key_scales_strides[2]],\n"
     "          lane * KEY_PART, key);\n"},
    {"keys quantized !dense_keys !key_codes",
     "      h2o_load_quantized<KEY_PART, KB, G>(\n"
     "          key_words + (key_words_start + i * key_words_strides[2]), key_words_strides[3],\n"
     "          key_scales + (key_scales_start + i * key_scales_strides[2]), key_scales_strides[3],\n"
     "          key_biases + (key_biases_start + i * key_biases_strides[2]), key_biases_strides[3],\n"
     "          lane * KEY_PART, key);\n"},
    {"keys !quantized",
     "      const int64_t key_row = key_start + i * keys_strides[2];\n"
     "      h2o_load<KEY_PART>(keys + key_row, keys_strides[3], key);\n"},
    {"keys !sparse",
     "      float value[VALUE_PART];\n"},
    {"keys !sparse !quantized",
     "      const int64_t value_row = value_start + i * values_strides[2];\n"
     "      h2o_load<VALUE_PART>(values + value_row, values_strides[3], value);\n"},
    {"keys",
     "      float score = metal::simd_sum(h2o_dot<KEY_PART>(query, key));\n"},
    {"keys additive_mask",
     "      score += bias;\n"
     "      state.total += bias - bias;\n"},
    {"keys row_bias",
     "      score += own_bias;\n"
     "      state.total += own_bias - own_bias;\n"},
    {"keys scores",
     "      if (lane == 0) {\n"
     "        scores[row * key_count + i] = score;\n"
     "      }\n"},
    {"keys sparse",
     "      h2o_softmax_count(state, score);\n"},
    {"keys !sparse",
     "      const float weight = h2o_softmax_weigh<VALUE_PART>(state, sums, score);\n"},
    {"keys !sparse quantized value_codes",
     "      h2o_load_codes<VALUE_PART, VB>(\n"
     "          value_words + (value_words_start + i * value_words_strides[2]), value_words_strides[3],\n"
     "          value_levels, value_scales[value_scales_start + i * value_scales_strides[2]],\n"
     "          lane * VALUE_PART, value);\n"},
    {"keys !sparse quantized !value_codes",
     "      h2o_load_quantized<VALUE_PART, VB, G>(\n"
     "          value_words + (value_words_start + i * value_words_strides[2]), value_words_strides[3],\n"
     "          value_scales + (value_scales_start + i * value_scales_strides[2]),\n"
     "          value_scales_strides[3],\n"
     "          value_biases + (value_biases_start + i * value_biases_strides[2]),\n"
     "          value_biases_strides[3],\n"
     "          lane * VALUE_PART, value);\n"},
    {"keys !sparse",
     "      h2o_add_row<VALUE_PART>(sums, weight, value);\n"},
    {"keys",
     "    }\n"
     "  }\n"
     "  if (lane == 0) {\n"
     "    maxima[group] = state.maximum;\n"
     "    totals[group] = state.total;\n"
     "  }\n"},
    {"keys sparse",
     "  metal::threadgroup_barrier(metal::mem_flags::mem_device | metal::mem_flags::mem_threadgroup);\n"},
    {"keys !sparse",
     "  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"},
    {"keys",
     "  const bool has_part = lane < NS;\n"
     "  h2o_softmax part = h2o_softmax_empty();\n"
     "  if (has_part) {\n"
     "    part.maximum = maxima[lane];\n"
     "    part.total = totals[lane];\n"
     "  }\n"
     "  const h2o_merged merged = h2o_softmax_merge(part);\n"},
    {"!keys",
     "  const bool has_part = lane < NS;\n"
     "  h2o_softmax part = h2o_softmax_empty();\n"
     "  if (lane < blocks) {\n"
     "    part.maximum = partial_maxima[row * blocks + lane];\n"
     "    part.total = partial_totals[row * blocks + lane];\n"
     "  }\n"
     "  const h2o_merged merged = h2o_softmax_merge(part);\n"
     "  const float maximum = metal::simd_shuffle(part.maximum, ushort(block));\n"
     "  const float share = metal::simd_shuffle(merged.share, ushort(block));\n"},
    {"sparse values keys",
     "  const float maximum = merged.maximum;\n"
     "  const float share = 1.0f;\n"},
    {"sparse values",
     "  const float least = params[2] * merged.total;\n"},
    {"sparse values skipped",
     "  H2O_THREADGROUP(float, counts, NS);\n"
     "  float count = 0.0f;\n"},
    {"sparse values",
     "  for (int start = first_key; start < key_count; start += LANES * key_step) {\n"
     "    const int own_key = start + lane * key_step;\n"
     "    const float score =\n"
     "        own_key < key_count ? scores[row * key_count + own_key] : H2O_NEGATIVE_INFINITY;\n"
     "    float own_weight = 0.0f;\n"
     "    if (!(score <= H2O_LOWEST)) {\n"
     "      own_weight = metal::fast::exp(score - maximum);\n"
     "      if (own_weight * share < least) {\n"
     "        own_weight = 0.0f;\n"},
    {"sparse values skipped",
     "        count += 1.0f;\n"},
    {"sparse values",
     "      }\n"
     "    }\n"
     "    for (int from = 0, i = start; from < LANES && i < key_count; from++, i += key_step) {\n"
     "      const float weight = metal::simd_shuffle(own_weight, ushort(from));\n"
     "      if (weight == 0.0f) {\n"
     "        continue;\n"
     "      }\n"
     "      float value[VALUE_PART];\n"},
    {"sparse values value_codes",
     "      h2o_load_codes<VALUE_PART, VB>(\n"
     "          value_words + (value_words_start + i * value_words_strides[2]), value_words_strides[3],\n"
     "          value_levels, value_scales[value_scales_start + i * value_scales_strides[2]],\n"
     "          lane * VALUE_PART, value);\n"},
    {"sparse values !value_codes",
     "      h2o_load_quantized<VALUE_PART, VB, G>(\n"
     "          value_words + (value_words_start + i * value_words_strides[2]), value_words_strides[3],\n"
     "          value_scales + (value_scales_start + i * value_scales_strides[2]),\n"
     "          value_scales_strides[3],\n"
     "          value_biases + (value_biases_start + i * value_biases_strides[2]),\n"
     "          value_biases_strides[3],\n"
     "          lane * VALUE_PART, value);\n"},
    {"sparse values",
     "      h2o_add_row<VALUE_PART>(sums, weight, value);\n"
     "    }\n"
     "  }\n"},
    {"sparse values skipped",
     "  const float group_count = metal::simd_sum(count);\n"
     "  if (lane == 0) {\n"
     "    counts[group] = group_count;\n"
     "  }\n"},
    {"values",
     "  H2O_UNROLL\n"
     "  for (int j = 0; j < VALUE_PART; j++) {\n"
     "    tile[group * (LANES + 1) + lane] = sums[j];\n"
     "    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
     "    for (int column = group; column < LANES; column += NS) {\n"},
    {"values sparse",
     "      const float column_part = has_part ? tile[lane * (LANES + 1) + column] : 0.0f;\n"},
    {"values !sparse",
     "      const float column_part = has_part ? tile[lane * (LANES + 1) + column] * merged.share : 0.0f;\n"},
    {"values",
     "      const float sum = metal::simd_sum(column_part);\n"
     "      if (lane == 0) {\n"},
    {"values blocks",
     "        partial_sums[(row * blocks + block) * V + column * VALUE_PART + j] = sum;\n"},
    {"values !blocks",
     "        const float mean = h2o_softmax_mean(sum, merged.total);\n"
     "        out[row * V + column * VALUE_PART + j] = static_cast<T>(mean);\n"},
    {"values",
     "      }\n"
     "    }\n"
     "    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
     "  }\n"},
    {"values skipped sparse",
     "  const float skipped_rows = metal::simd_sum(has_part ? counts[lane] : 0.0f);\n"
     "  if (group == 0 && lane == 0) {\n"},
    {"values skipped sparse blocks",
     "    partial_skipped[row * blocks + block] = skipped_rows / float(key_count);\n"},
    {"values skipped sparse !blocks",
     "    skipped[row] = skipped_rows / float(key_count);\n"},
    {"values skipped sparse",
     "  }\n"},
    {"blocks keys",
     "  if (group == 0 && lane == 0) {\n"
     "    partial_maxima[row * blocks + block] = merged.maximum;\n"
     "    partial_totals[row * blocks + block] = merged.total;\n"
     "  }\n"},
    {"!blocks lse",
     "  if (group == 0 && lane == 0) {\n"
     "    lse[row] = h2o_softmax_lse(merged.maximum, merged.total);\n"
     "  }\n"},
};

static const mlx_h2o_kernel_text mlx_h2o_sdpa_vector_text = {
    "sdpa_vector",
    "keys values",
    "bool_mask additive_mask sinks scores lse row_bias",
    mlx_h2o_sdpa_vector_template,
    sizeof(mlx_h2o_sdpa_vector_template) / sizeof(mlx_h2o_sdpa_vector_template[0]),
    mlx_h2o_sdpa_vector_inputs,
    sizeof(mlx_h2o_sdpa_vector_inputs) / sizeof(mlx_h2o_sdpa_vector_inputs[0]),
    mlx_h2o_sdpa_vector_outputs,
    sizeof(mlx_h2o_sdpa_vector_outputs) / sizeof(mlx_h2o_sdpa_vector_outputs[0]),
    mlx_h2o_sdpa_vector_segments,
    sizeof(mlx_h2o_sdpa_vector_segments) / sizeof(mlx_h2o_sdpa_vector_segments[0]),
};

static const mlx_h2o_kernel_text mlx_h2o_sdpa_vector_2pass_1_text = {
    "sdpa_vector_2pass_1",
    "blocks keys values",
    "bool_mask additive_mask sinks scores row_bias",
    mlx_h2o_sdpa_vector_template,
    sizeof(mlx_h2o_sdpa_vector_template) / sizeof(mlx_h2o_sdpa_vector_template[0]),
    mlx_h2o_sdpa_vector_inputs,
    sizeof(mlx_h2o_sdpa_vector_inputs) / sizeof(mlx_h2o_sdpa_vector_inputs[0]),
    mlx_h2o_sdpa_vector_outputs,
    sizeof(mlx_h2o_sdpa_vector_outputs) / sizeof(mlx_h2o_sdpa_vector_outputs[0]),
    mlx_h2o_sdpa_vector_segments,
    sizeof(mlx_h2o_sdpa_vector_segments) / sizeof(mlx_h2o_sdpa_vector_segments[0]),
};

static const mlx_h2o_kernel_text mlx_h2o_sdpa_vector_quantized_text = {
    "sdpa_vector_quantized",
    "quantized keys values",
    "bool_mask additive_mask sinks scores lse row_bias dense_keys key_codes value_codes",
    mlx_h2o_sdpa_vector_template,
    sizeof(mlx_h2o_sdpa_vector_template) / sizeof(mlx_h2o_sdpa_vector_template[0]),
    mlx_h2o_sdpa_vector_inputs,
    sizeof(mlx_h2o_sdpa_vector_inputs) / sizeof(mlx_h2o_sdpa_vector_inputs[0]),
    mlx_h2o_sdpa_vector_outputs,
    sizeof(mlx_h2o_sdpa_vector_outputs) / sizeof(mlx_h2o_sdpa_vector_outputs[0]),
    mlx_h2o_sdpa_vector_segments,
    sizeof(mlx_h2o_sdpa_vector_segments) / sizeof(mlx_h2o_sdpa_vector_segments[0]),
};

static const mlx_h2o_kernel_text mlx_h2o_sdpa_vector_2pass_1_quantized_text = {
    "sdpa_vector_2pass_1_quantized",
    "blocks quantized keys values",
    "bool_mask additive_mask sinks scores row_bias dense_keys key_codes value_codes",
    mlx_h2o_sdpa_vector_template,
    sizeof(mlx_h2o_sdpa_vector_template) / sizeof(mlx_h2o_sdpa_vector_template[0]),
    mlx_h2o_sdpa_vector_inputs,
    sizeof(mlx_h2o_sdpa_vector_inputs) / sizeof(mlx_h2o_sdpa_vector_inputs[0]),
    mlx_h2o_sdpa_vector_outputs,
    sizeof(mlx_h2o_sdpa_vector_outputs) / sizeof(mlx_h2o_sdpa_vector_outputs[0]),
    mlx_h2o_sdpa_vector_segments,
    sizeof(mlx_h2o_sdpa_vector_segments) / sizeof(mlx_h2o_sdpa_vector_segments[0]),
};

static const mlx_h2o_kernel_text mlx_h2o_sdpa_vector_sparse_quantized_text = {
    "sdpa_vector_sparse_quantized",
    "quantized sparse keys values scores",
    "bool_mask additive_mask sinks lse skipped row_bias dense_keys key_codes value_codes",
    mlx_h2o_sdpa_vector_template,
    sizeof(mlx_h2o_sdpa_vector_template) / sizeof(mlx_h2o_sdpa_vector_template[0]),
    mlx_h2o_sdpa_vector_inputs,
    sizeof(mlx_h2o_sdpa_vector_inputs) / sizeof(mlx_h2o_sdpa_vector_inputs[0]),
    mlx_h2o_sdpa_vector_outputs,
    sizeof(mlx_h2o_sdpa_vector_outputs) / sizeof(mlx_h2o_sdpa_vector_outputs[0]),
    mlx_h2o_sdpa_vector_segments,
    sizeof(mlx_h2o_sdpa_vector_segments) / sizeof(mlx_h2o_sdpa_vector_segments[0]),
};

static const mlx_h2o_kernel_text mlx_h2o_sdpa_vector_sparse_keys_quantized_text = {
    "sdpa_vector_sparse_keys_quantized",
    "blocks quantized sparse keys scores",
    "bool_mask additive_mask sinks row_bias dense_keys key_codes",
    mlx_h2o_sdpa_vector_template,
    sizeof(mlx_h2o_sdpa_vector_template) / sizeof(mlx_h2o_sdpa_vector_template[0]),
    mlx_h2o_sdpa_vector_inputs,
    sizeof(mlx_h2o_sdpa_vector_inputs) / sizeof(mlx_h2o_sdpa_vector_inputs[0]),
    mlx_h2o_sdpa_vector_outputs,
    sizeof(mlx_h2o_sdpa_vector_outputs) / sizeof(mlx_h2o_sdpa_vector_outputs[0]),
    mlx_h2o_sdpa_vector_segments,
    sizeof(mlx_h2o_sdpa_vector_segments) / sizeof(mlx_h2o_sdpa_vector_segments[0]),
};

static const mlx_h2o_kernel_text mlx_h2o_sdpa_vector_sparse_values_quantized_text = {
    "sdpa_vector_sparse_values_quantized",
    "blocks quantized sparse values",
    "skipped value_codes",
    mlx_h2o_sdpa_vector_template,
    sizeof(mlx_h2o_sdpa_vector_template) / sizeof(mlx_h2o_sdpa_vector_template[0]),
    mlx_h2o_sdpa_vector_inputs,
    sizeof(mlx_h2o_sdpa_vector_inputs) / sizeof(mlx_h2o_sdpa_vector_inputs[0]),
    mlx_h2o_sdpa_vector_outputs,
    sizeof(mlx_h2o_sdpa_vector_outputs) / sizeof(mlx_h2o_sdpa_vector_outputs[0]),
    mlx_h2o_sdpa_vector_segments,
    sizeof(mlx_h2o_sdpa_vector_segments) / sizeof(mlx_h2o_sdpa_vector_segments[0]),
};

static const mlx_h2o_kernel_buffer mlx_h2o_sdpa_vector_2pass_2_template[] = {
    {"T", ""},
    {"V", ""},
};

static const mlx_h2o_kernel_buffer mlx_h2o_sdpa_vector_2pass_2_inputs[] = {
    {"partial_sums", ""},
    {"partial_maxima", ""},
    {"partial_totals", ""},
    {"partial_skipped", "skipped"},
};

static const mlx_h2o_kernel_buffer mlx_h2o_sdpa_vector_2pass_2_outputs[] = {
    {"out", ""},
    {"lse", "lse"},
    {"skipped", "skipped"},
};

static const mlx_h2o_kernel_segment mlx_h2o_sdpa_vector_2pass_2_segments[] = {
    {"",
     "  constexpr int LANES = 32;\n"
     "  constexpr int PARTS = V / LANES;\n"
     "  const int lane = int(thread_index_in_simdgroup);\n"
     "  const int64_t row = int64_t(threadgroup_position_in_grid.x) / PARTS;\n"
     "  const int column = int(threadgroup_position_in_grid.x) % PARTS * LANES + lane;\n"
     "  const int blocks = partial_maxima_shape[3];\n"
     "  h2o_softmax part = h2o_softmax_empty();\n"
     "  if (lane < blocks) {\n"
     "    part.maximum = partial_maxima[row * blocks + lane];\n"
     "    part.total = partial_totals[row * blocks + lane];\n"
     "  }\n"
     "  const h2o_merged merged = h2o_softmax_merge(part);\n"
     "  float sum = 0.0f;\n"
     "  for (int b = 0; b < blocks; b++) {\n"
     "    const float share = metal::simd_shuffle(merged.share, ushort(b));\n"
     "    sum += share * partial_sums[(row * blocks + b) * V + column];\n"
     "  }\n"
     "  out[row * V + column] = static_cast<T>(h2o_softmax_mean(sum, merged.total));\n"},
    {"skipped",
     "  const float rows_skipped =\n"
     "      metal::simd_sum(lane < blocks ? partial_skipped[row * blocks + lane] : 0.0f);\n"
     "  if (column == 0) {\n"
     "    skipped[row] = rows_skipped;\n"
     "  }\n"},
    {"lse",
     "  if (column == 0) {\n"
     "    lse[row] = h2o_softmax_lse(merged.maximum, merged.total);\n"
     "  }\n"},
};

static const mlx_h2o_kernel_text mlx_h2o_sdpa_vector_2pass_2_text = {
    "sdpa_vector_2pass_2",
    "",
    "lse skipped",
    mlx_h2o_sdpa_vector_2pass_2_template,
    sizeof(mlx_h2o_sdpa_vector_2pass_2_template) / sizeof(mlx_h2o_sdpa_vector_2pass_2_template[0]),
    mlx_h2o_sdpa_vector_2pass_2_inputs,
    sizeof(mlx_h2o_sdpa_vector_2pass_2_inputs) / sizeof(mlx_h2o_sdpa_vector_2pass_2_inputs[0]),
    mlx_h2o_sdpa_vector_2pass_2_outputs,
    sizeof(mlx_h2o_sdpa_vector_2pass_2_outputs) / sizeof(mlx_h2o_sdpa_vector_2pass_2_outputs[0]),
    mlx_h2o_sdpa_vector_2pass_2_segments,
    sizeof(mlx_h2o_sdpa_vector_2pass_2_segments) / sizeof(mlx_h2o_sdpa_vector_2pass_2_segments[0]),
};

static const mlx_h2o_kernel_buffer mlx_h2o_add_mass_template[] = {
    {"NS", ""},
};

static const mlx_h2o_kernel_buffer mlx_h2o_add_mass_inputs[] = {
    {"importance", ""},
    {"scores", ""},
    {"lse", ""},
};

static const mlx_h2o_kernel_buffer mlx_h2o_add_mass_outputs[] = {
    {"accumulated", ""},
};

static const mlx_h2o_kernel_segment mlx_h2o_add_mass_segments[] = {
    {"",
     "  constexpr int LANES = 32;\n"
     "  const int head = int(threadgroup_position_in_grid.y);\n"
     "  const int heads = importance_shape[1];\n"
     "  const int row_count = importance_shape[2];\n"
     "  const int group = int(threadgroup_position_in_grid.x) * NS + int(simdgroup_index_in_threadgroup);\n"
     "  const int row = group * LANES + int(thread_index_in_simdgroup);\n"
     "  if (row >= row_count) {\n"
     "    return;\n"
     "  }\n"
     "  float mass = importance[(head / heads) * importance_strides[0] +\n"
     "                          (head % heads) * importance_strides[1] + row * importance_strides[2]];\n"
     "  const int scored = scores_shape[3];\n"
     "  if (row < scored) {\n"
     "    mass = mass == mass ? mass : 0.0f;\n"
     "    const int queries = scores_shape[1] * scores_shape[2] / heads;\n"
     "    const int64_t first = int64_t(head) * queries;\n"
     "    for (int64_t query = first; query < first + queries; query++) {\n"
     "      const float total = lse[query] == H2O_NEGATIVE_INFINITY ? 0.0f : lse[query];\n"
     "      mass += metal::precise::exp(scores[query * scored + row] - total);\n"
     "    }\n"
     "  }\n"
     "  accumulated[int64_t(head) * row_count + row] = mass;\n"},
};

static const mlx_h2o_kernel_text mlx_h2o_add_mass_text = {
    "add_mass",
    "",
    "",
    mlx_h2o_add_mass_template,
    sizeof(mlx_h2o_add_mass_template) / sizeof(mlx_h2o_add_mass_template[0]),
    mlx_h2o_add_mass_inputs,
    sizeof(mlx_h2o_add_mass_inputs) / sizeof(mlx_h2o_add_mass_inputs[0]),
    mlx_h2o_add_mass_outputs,
    sizeof(mlx_h2o_add_mass_outputs) / sizeof(mlx_h2o_add_mass_outputs[0]),
    mlx_h2o_add_mass_segments,
    sizeof(mlx_h2o_add_mass_segments) / sizeof(mlx_h2o_add_mass_segments[0]),
};

static const mlx_h2o_kernel_buffer mlx_h2o_keep_rows_template[] = {
    {"NS", ""},
};

static const mlx_h2o_kernel_buffer mlx_h2o_keep_rows_inputs[] = {
    {"scores", ""},
    {"positions", ""},
    {"recent_starts", ""},
    {"zones", ""},
};

static const mlx_h2o_kernel_buffer mlx_h2o_keep_rows_outputs[] = {
    {"kept", ""},
};

static const mlx_h2o_kernel_segment mlx_h2o_keep_rows_segments[] = {
    {"",
     "  constexpr int LANES = 32;\n"
     "  H2O_THREADGROUP(int, counts, NS);\n"
     "  const int lane = int(thread_index_in_simdgroup);\n"
     "  const int group = int(simdgroup_index_in_threadgroup);\n"
     "  const int head_count = positions_shape[1];\n"
     "  const int row_count = positions_shape[2];\n"
     "  const int batch = int(threadgroup_position_in_grid.x) / head_count;\n"
     "  const int head = int(threadgroup_position_in_grid.x) % head_count;\n"
     "  const int64_t scores_start = batch * scores_strides[0] + head * scores_strides[1];\n"
     "  const int64_t positions_start = batch * positions_strides[0] + head * positions_strides[1];\n"
     "  const int sink_end = zones[0];\n"
     "  const int recent_start = recent_starts[batch * recent_starts_strides[0]];\n"
     "  const int dropped = zones[1];\n"
     "  const int kept_count = row_count - dropped;\n"
     "  uint32_t upper = 0;\n"
     "  uint32_t lower = 0;\n"
     "  for (int round = 0; round < 64; round++) {\n"
     "    const bool is_upper = round < 32;\n"
     "    const uint32_t bit = 1u << (31 - round % 32);\n"
     "    const uint32_t candidate = (is_upper ? upper : lower) | bit;\n"
     "    int below = 0;\n"
     "    for (int row = group * LANES + lane; row < row_count; row += NS * LANES) {\n"
     "      const h2o_retention key = h2o_retention_key(\n"
     "          scores[scores_start + row * scores_strides[2]],\n"
     "          positions[positions_start + row * positions_strides[2]], row, sink_end, recent_start);\n"
     "      const bool is_below = is_upper\n"
     "          ? key.upper < candidate\n"
     "          : key.upper < upper || (key.upper == upper && key.lower < candidate);\n"
     "      below += is_below ? 1 : 0;\n"
     "    }\n"
     "    below = metal::simd_sum(below);\n"
     "    if (lane == 0) {\n"
     "      counts[group] = below;\n"
     "    }\n"
     "    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
     "    const int all_below = metal::simd_sum(lane < NS ? counts[lane] : 0);\n"
     "    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
     "    if (all_below <= dropped) {\n"
     "      if (is_upper) {\n"
     "        upper = candidate;\n"
     "      } else {\n"
     "        lower = candidate;\n"
     "      }\n"
     "    }\n"
     "  }\n"
     "  const int part = (row_count + NS * LANES - 1) / (NS * LANES) * LANES;\n"
     "  const int first = group * part;\n"
     "  for (int pass = 0; pass < 2; pass++) {\n"
     "    int before = 0;\n"
     "    if (pass == 1) {\n"
     "      before = metal::simd_sum(lane < group ? counts[lane] : 0);\n"
     "    }\n"
     "    int found = 0;\n"
     "    for (int start = first; start < first + part; start += LANES) {\n"
     "      const int row = start + lane;\n"
     "      int stays = 0;\n"
     "      if (row < row_count) {\n"
     "        const h2o_retention key = h2o_retention_key(\n"
     "            scores[scores_start + row * scores_strides[2]],\n"
     "            positions[positions_start + row * positions_strides[2]], row, sink_end, recent_start);\n"
     "        stays = key.upper > upper || (key.upper == upper && key.lower >= lower) ? 1 : 0;\n"
     "      }\n"
     "      int so_far = stays;\n"
     "      for (int distance = 1; distance < LANES; distance *= 2) {\n"
     "        const int other = metal::simd_shuffle(so_far, ushort(metal::max(lane - distance, 0)));\n"
     "        so_far += lane >= distance ? other : 0;\n"
     "      }\n"
     "      if (pass == 1 && stays == 1) {\n"
     "        const int place = before + found + so_far - 1;\n"
     "        kept[int64_t(threadgroup_position_in_grid.x) * kept_count + place] = uint32_t(row);\n"
     "      }\n"
     "      found += metal::simd_shuffle(so_far, ushort(LANES - 1));\n"
     "    }\n"
     "    if (pass == 0) {\n"
     "      if (lane == 0) {\n"
     "        counts[group] = found;\n"
     "      }\n"
     "      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
     "    }\n"
     "  }\n"},
};

static const mlx_h2o_kernel_text mlx_h2o_keep_rows_text = {
    "keep_rows",
    "",
    "",
    mlx_h2o_keep_rows_template,
    sizeof(mlx_h2o_keep_rows_template) / sizeof(mlx_h2o_keep_rows_template[0]),
    mlx_h2o_keep_rows_inputs,
    sizeof(mlx_h2o_keep_rows_inputs) / sizeof(mlx_h2o_keep_rows_inputs[0]),
    mlx_h2o_keep_rows_outputs,
    sizeof(mlx_h2o_keep_rows_outputs) / sizeof(mlx_h2o_keep_rows_outputs[0]),
    mlx_h2o_keep_rows_segments,
    sizeof(mlx_h2o_keep_rows_segments) / sizeof(mlx_h2o_keep_rows_segments[0]),
};

static const mlx_h2o_kernel_buffer mlx_h2o_encode_rows_template[] = {
    {"T", ""},
    {"D", ""},
    {"BITS", ""},
};

static const mlx_h2o_kernel_buffer mlx_h2o_encode_rows_inputs[] = {
    {"rows", ""},
    {"signs", ""},
    {"levels", ""},
};

static const mlx_h2o_kernel_buffer mlx_h2o_encode_rows_outputs[] = {
    {"words", ""},
    {"norms", ""},
};

static const mlx_h2o_kernel_segment mlx_h2o_encode_rows_segments[] = {
    {"",
     "  constexpr int LANES = 32;\n"
     "  constexpr int E = D / LANES;\n"
     "  constexpr int WORDS = D * BITS / 32;\n"
     "  constexpr float LEAST_NORM = 1e-8f;\n"
     "  H2O_THREADGROUP(ushort, codes, D);\n"
     "  const int lane = int(thread_index_in_simdgroup);\n"
     "  const int heads = rows_shape[1];\n"
     "  const int count = rows_shape[2];\n"
     "  const int64_t row = int64_t(threadgroup_position_in_grid.x);\n"
     "  const int batch = int(row / (int64_t(heads) * count));\n"
     "  const int head = int(row / count % heads);\n"
     "  const int token = int(row % count);\n"
     "  float elements[E];\n"
     "  h2o_load<E>(\n"
     "      rows + h2o_offset(rows_strides, batch, head, token, lane * E), rows_strides[3], elements);\n"
     "  const float length = metal::precise::sqrt(metal::simd_sum(h2o_dot<E>(elements, elements)));\n"
     "  for (int j = 0; j < E; j++) {\n"
     "    elements[j] = elements[j] / metal::max(length, LEAST_NORM) * signs[lane * E + j];\n"
     "  }\n"
     "  H2O_UNROLL\n"
     "  for (int bit = 1; bit < E; bit *= 2) {\n"
     "    H2O_UNROLL\n"
     "    for (int j = 0; j < E; j++) {\n"
     "      if ((j & bit) == 0) {\n"
     "        const float sum = elements[j] + elements[j + bit];\n"
     "        elements[j + bit] = elements[j] - elements[j + bit];\n"
     "        elements[j] = sum;\n"
     "      }\n"
     "    }\n"
     "  }\n"
     "  for (int bit = 1; bit < LANES; bit *= 2) {\n"
     "    for (int j = 0; j < E; j++) {\n"
     "      const float other = metal::simd_shuffle(elements[j], ushort(lane ^ bit));\n"
     "      elements[j] = (lane & bit) == 0 ? elements[j] + other : other - elements[j];\n"
     "    }\n"
     "  }\n"
     "  const float scale = 1.0f / metal::precise::sqrt(float(D));\n"
     "  ushort exceeded[E];\n"
     "  for (int j = 0; j < E; j++) {\n"
     "    exceeded[j] = 0;\n"
     "  }\n"
     "  for (int k = 0; k + 1 < (1 << BITS); k++) {\n"
     "    const float mean = (levels[k] + levels[k + 1]) / 2.0f;\n"
     "    for (int j = 0; j < E; j++) {\n"
     "      exceeded[j] += elements[j] * scale > mean ? 1 : 0;\n"
     "    }\n"
     "  }\n"
     "  for (int j = 0; j < E; j++) {\n"
     "    elements[j] = levels[exceeded[j]];\n"
     "  }\n"
     "  const float coded = metal::precise::sqrt(metal::simd_sum(h2o_dot<E>(elements, elements)));\n"
     "  if (lane == 0) {\n"
     "    norms[row] = length / coded;\n"
     "  }\n"
     "  for (int j = 0; j < E; j++) {\n"
     "    codes[lane * E + j] = exceeded[j];\n"
     "  }\n"
     "  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
     "  for (int word = lane; word < WORDS; word += LANES) {\n"
     "    uint32_t filled = 0;\n"
     "    for (int j = word * 32 / BITS; j * BITS < (word + 1) * 32; j++) {\n"
     "      const int shift = j * BITS - word * 32;\n"
     "      const uint32_t code = codes[j];\n"
     "      filled |= shift < 0 ? code >> -shift : code << shift;\n"
     "    }\n"
     "    words[row * WORDS + word] = filled;\n"
     "  }\n"},
};

static const mlx_h2o_kernel_text mlx_h2o_encode_rows_text = {
    "encode_rows",
    "",
    "",
    mlx_h2o_encode_rows_template,
    sizeof(mlx_h2o_encode_rows_template) / sizeof(mlx_h2o_encode_rows_template[0]),
    mlx_h2o_encode_rows_inputs,
    sizeof(mlx_h2o_encode_rows_inputs) / sizeof(mlx_h2o_encode_rows_inputs[0]),
    mlx_h2o_encode_rows_outputs,
    sizeof(mlx_h2o_encode_rows_outputs) / sizeof(mlx_h2o_encode_rows_outputs[0]),
    mlx_h2o_encode_rows_segments,
    sizeof(mlx_h2o_encode_rows_segments) / sizeof(mlx_h2o_encode_rows_segments[0]),
};

#endif
