// Device code shared by every kernel: the `header` text of metal_kernel and
// cuda_kernel, and of the host emulator.  No includes; ASCII only.
#if defined(__METAL_VERSION__)
// The one way to allocate threadgroup memory: each platform's shim has its own.
#define H2O_THREADGROUP(T, name, count) threadgroup T name[count]
#endif

#define H2O_NEGATIVE_INFINITY (-metal::numeric_limits<float>::infinity())

// Where running maxima start: finite, because -inf - -inf is NaN.
#define H2O_LOWEST (-metal::numeric_limits<float>::max())

// Offset of [batch, head, row, element] in a strided buffer.
template <typename S>
inline int64_t h2o_offset(S strides, int batch, int head, int row, int element) {
  return batch * strides[0] + head * strides[1] + row * strides[2] + element * strides[3];
}

// E elements of a row, widened to float.  The pointer type is deduced, so that
// device and constant buffers both fit; neighbours in memory are the usual case
// and a branch of their own, which the compiler turns into wide loads.
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

// One lane's part of a dot product.
template <int E>
inline float h2o_dot(thread const float* a, thread const float* b) {
  float sum = 0.0f;
  for (int j = 0; j < E; j++) {
    sum += a[j] * b[j];
  }
  return sum;
}

// Softmax over the keys seen so far: sum of exp(score - maximum) is `total`.
// The weighted values stand beside it, in the caller's registers.
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

// A learned logit joins the denominator and brings no value.
inline void h2o_softmax_sink(thread h2o_softmax& state, float logit) {
  if (!(logit <= H2O_LOWEST)) {
    state.maximum = logit;
    state.total = 1.0f;
  }
}

// One more key, with its value row (online softmax).
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

// What a partial softmax counts for in one whose maximum is `maximum`.
inline float h2o_softmax_share(float partial_maximum, float maximum) {
  return metal::fast::exp(partial_maximum - maximum);
}

// Log of the denominator; -inf where no key and no sink took part.
inline float h2o_softmax_lse(float maximum, float total) {
  return total == 0.0f ? H2O_NEGATIVE_INFINITY : maximum + metal::precise::log(total);
}
