// Device code shared by every kernel: the `header` text of metal_kernel and
// cuda_kernel, and of the host emulator.  No includes; ASCII only.
#if defined(__METAL_VERSION__)
// The only way to allocate threadgroup memory: each platform's shim defines its own.
#define H2O_THREADGROUP(T, name, count) threadgroup T name[count]
#define H2O_UNROLL _Pragma("clang loop unroll(full)")
#endif

#define H2O_NEGATIVE_INFINITY (-metal::numeric_limits<float>::infinity())

// The initial value of running maxima: finite, because -inf - -inf is NaN.
#define H2O_LOWEST (-metal::numeric_limits<float>::max())

// Offset of [batch, head, row, element] in a strided buffer.
template <typename S>
inline int64_t h2o_offset(S strides, int batch, int head, int row, int element) {
  return batch * strides[0] + head * strides[1] + row * strides[2] + element * strides[3];
}

// E elements of a row, widened to float.  The pointer type is deduced, to allow device
// and constant buffers. Contiguous elements are the usual case, and get their own
// branch, which the compiler turns into wide loads.
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

// E fields of BITS bits, from field `first` on, of a stream of 32-bit words, lowest first.
template <int E, int BITS, typename W>
inline void h2o_load_fields(W words, int64_t word_stride, int first, thread uint32_t* fields) {
  constexpr int LENGTH = E * BITS;
  constexpr int WORDS = (LENGTH + 31) / 32;
  // Whether a lane's part can begin and end anywhere within a word.
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
  // Shift all words at once, so that every index and shift below is a constant.
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

// E elements, from `first` on, of a row packed by mx.quantize: fields of BITS bits,
// with a scale and a bias for each GROUP elements.  The result stays in registers.
template <int E, int BITS, int GROUP, typename W, typename S, typename B>
inline void h2o_load_quantized(W words, int64_t word_stride, S scales, int64_t scale_stride,
                               B biases, int64_t bias_stride, int first, thread float* values) {
  uint32_t fields[E];
  h2o_load_fields<E, BITS>(words, word_stride, first, fields);
  // E is below GROUP, so a lane touches at most two groups.
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

// The same for codes of a rotated row, times its norm: levels in the basis of the codes.
template <int E, int BITS, typename W, typename L>
inline void h2o_load_codes(W words, int64_t word_stride, L levels, float norm, int first,
                           thread float* values) {
  uint32_t fields[E];
  h2o_load_fields<E, BITS>(words, word_stride, first, fields);
  for (int j = 0; j < E; j++) {
    values[j] = norm * levels[fields[j]];
  }
}

// One lane's part of a dot product.
template <int E>
inline float h2o_dot(thread const float* a, thread const float* b) {
  float sum = 0.0f;
  for (int j = 0; j < E; j++) {
    sum += a[j] * b[j];
  }
  return sum;
}

// Softmax over the keys seen so far: `total` is the sum of exp(score - maximum). The
// caller keeps the weighted sum of the values in registers.
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

// A learned logit joins the denominator but has no value.
inline void h2o_softmax_sink(thread h2o_softmax& state, float logit) {
  if (!(logit <= H2O_LOWEST)) {
    state.maximum = logit;
    state.total = 1.0f;
  }
}

// Adds a key (online softmax) and returns its weight relative to the new maximum.
// Rescales the sums to that maximum; h2o_add_row then adds the value row.
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

// The same without values, or when they follow later.
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

// One of several parts, and the whole: the sums of a part count `share` times in the
// sums of the whole.
struct h2o_merged {
  float maximum;
  float total;
  float share;
};

// Merges partial softmaxes over different keys, one in each lane of a simdgroup; a lane
// without a part passes the empty one.  Used for simdgroups of a threadgroup, and for
// blocks of the two-pass kernels.
inline h2o_merged h2o_softmax_merge(h2o_softmax part) {
  h2o_merged all;
  all.maximum = metal::simd_max(part.maximum);
  all.share = metal::fast::exp(part.maximum - all.maximum);
  all.total = metal::simd_sum(part.total * all.share);
  return all;
}

// The output from the merged sums; 0 if no key took part.  The total carries NaN from a
// mask, and no comparison may hide it.
inline float h2o_softmax_mean(float sum, float total) {
  return total == 0.0f ? 0.0f : sum / total;
}

// Log of the denominator; -inf without any key or sink.
inline float h2o_softmax_lse(float maximum, float total) {
  return total == 0.0f ? H2O_NEGATIVE_INFINITY : maximum + metal::precise::log(total);
}

// The retention order of a row as a 64-bit number in two words; higher is kept longer:
// class (padding, unscored, scored, protected), score in the order of its bits, then
// the lower position first; padding uses its slot as position.
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
    // -0 and 0 are equal.
    const uint32_t bits = as_type<uint32_t>(score == 0.0f ? 0.0f : score);
    ranked = (bits >> 31) != 0u ? ~bits : bits | 0x80000000u;
  }
  const uint32_t place = 0x3FFFFFFFu - static_cast<uint32_t>(is_padding ? slot : position);
  h2o_retention key;
  key.upper = (kind << 30) | (ranked >> 2);
  key.lower = (ranked << 30) | place;
  return key;
}
