// Generated from metal/ by tools/package_kernels.py; do not edit.
// swift-format-ignore-file

/// The text of a GPU kernel, for `MLXFast.metalKernel`.
///
/// Segments and buffers exist when their condition holds: flags separated by
/// spaces, all of which must be on, or off where a flag has a "!" before it.
struct KernelText: Sendable {
  struct Segment: Sendable {
    let condition: String
    let text: String
  }

  struct Buffer: Sendable {
    let name: String
    let condition: String
  }

  let name: String
  let template: [String]
  let inputs: [Buffer]
  let outputs: [Buffer]
  let segments: [Segment]

  static let flags = ["bool_mask", "additive_mask", "sinks", "scores", "lse"]

  static let header = #"""
    #if defined(__METAL_VERSION__)
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

    """#

  static let sdpaVector = KernelText(
    name: "sdpa_vector",
    template: ["T", "D", "V", "NS", "CAUSAL"],
    inputs: [
      Buffer(name: "queries", condition: ""),
      Buffer(name: "keys", condition: ""),
      Buffer(name: "values", condition: ""),
      Buffer(name: "mask", condition: "bool_mask"),
      Buffer(name: "mask", condition: "additive_mask"),
      Buffer(name: "sinks", condition: "sinks"),
      Buffer(name: "params", condition: ""),
    ],
    outputs: [
      Buffer(name: "out", condition: ""),
      Buffer(name: "scores", condition: "scores"),
      Buffer(name: "lse", condition: "lse"),
    ],
    segments: [
      Segment(
        condition: "",
        text: #"""
            constexpr int LANES = 32;
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

          """#),
      Segment(
        condition: "sinks",
        text: #"""
            if (group == 0) {
              h2o_softmax_sink(state, static_cast<float>(sinks[head * sinks_strides[0]]));
            }

          """#),
      Segment(
        condition: "",
        text: #"""
            const int64_t key_start = h2o_offset(keys_strides, batch, kv_head, 0, lane * KEY_PART);
            const int64_t value_start = h2o_offset(values_strides, batch, kv_head, 0, lane * VALUE_PART);

          """#),
      Segment(
        condition: "bool_mask",
        text: #"""
            const int64_t mask_start = h2o_offset(mask_strides, batch, head, query_index, 0);

          """#),
      Segment(
        condition: "additive_mask",
        text: #"""
            const int64_t mask_start = h2o_offset(mask_strides, batch, head, query_index, 0);

          """#),
      Segment(
        condition: "",
        text: #"""
            const int visible_end = CAUSAL ? key_count - query_count + query_index + 1 : key_count;
            for (int i = group; i < key_count; i += NS) {
              bool visible = i < visible_end;

          """#),
      Segment(
        condition: "bool_mask",
        text: #"""
              visible = visible && mask[mask_start + i * mask_strides[3]];

          """#),
      Segment(
        condition: "additive_mask",
        text: #"""
              const float bias = static_cast<float>(mask[mask_start + i * mask_strides[3]]);
              visible = visible && !(bias <= params[1]);

          """#),
      Segment(
        condition: "",
        text: #"""
              if (visible) {
                float key[KEY_PART];
                float value[VALUE_PART];
                const int64_t key_row = key_start + i * keys_strides[2];
                const int64_t value_row = value_start + i * values_strides[2];
                h2o_load<KEY_PART>(keys + key_row, keys_strides[3], key);
                h2o_load<VALUE_PART>(values + value_row, values_strides[3], value);
                float score = metal::simd_sum(h2o_dot<KEY_PART>(query, key));

          """#),
      Segment(
        condition: "additive_mask",
        text: #"""
                score += bias;
                state.total += bias - bias;

          """#),
      Segment(
        condition: "scores",
        text: #"""
                if (lane == 0) {
                  scores[row * key_count + i] = score;
                }

          """#),
      Segment(
        condition: "",
        text: #"""
                h2o_softmax_add<VALUE_PART>(state, sums, score, value);
              }

          """#),
      Segment(
        condition: "scores",
        text: #"""
              else if (lane == 0) {
                scores[row * key_count + i] = H2O_NEGATIVE_INFINITY;
              }

          """#),
      Segment(
        condition: "",
        text: #"""
            }
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

          """#),
      Segment(
        condition: "lse",
        text: #"""
            if (group == 0 && lane == 0) {
              lse[row] = h2o_softmax_lse(maximum, total);
            }

          """#),
    ])
}
