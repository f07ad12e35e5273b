// Masks on logits. Included once per SIMD target: hence no include guard.

template <typename Mask>
inline void mask_logits(float* logits, const Mask* mask, int64_t stride, int count,
                        float threshold) {
  for (int i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<Mask, uint8_t>) {
      logits[i] = mask[i * stride] != 0 ? logits[i] : -kInfinity;
    } else {
      const float bias = to_float(mask[i * stride]);
      logits[i] = bias <= threshold ? -kInfinity : logits[i] + bias;
    }
  }
}

// Adds the bias of `count` rows from `key` on to the logits of one query. A masked logit stays
// -inf, even if the bias is NaN.
inline void add_row_bias(const AttentionArguments& a, int64_t batch, int64_t kv_head, int64_t key,
                         int count, float* logits) {
  if (a.row_bias == nullptr) return;
  const float* bias =
      a.row_bias + batch * a.row_bias_strides[0] + kv_head * a.row_bias_strides[1] + key;
  constexpr float kLowest = std::numeric_limits<float>::lowest();
  for (int i = 0; i < count; ++i) {
    const bool hidden = bias[i] <= kLowest || logits[i] == -kInfinity;
    logits[i] = hidden ? -kInfinity : logits[i] + bias[i];
  }
}

// Masks the logits of one query for `count` keys from `key` on.
inline void mask_logits(const AttentionArguments& a, int64_t batch, int64_t head, int64_t query,
                        int64_t key, int count, float* logits) {
  const int64_t offset = batch * a.mask_strides[0] + head * a.mask_strides[1] +
                         query * a.mask_strides[2] + key * a.mask_strides[3];
  const auto by = [&](const auto* mask) {
    mask_logits(logits, mask + offset, a.mask_strides[3], count, a.mask_threshold);
  };
  if (a.mask == nullptr) return;
  if (a.mask_is_boolean) return by(static_cast<const uint8_t*>(a.mask));
  with_type(a.mask_type, [&]<typename T>(T) { by(static_cast<const T*>(a.mask)); });
}

// How many of `count` keys, from `first` on, the causal mask lets a query see.
inline int visible_keys(const AttentionArguments& a, int64_t query, int first, int count) {
  if (!a.causal) return count;
  const int64_t last = query + a.key_count - a.query_count;
  return static_cast<int>(std::clamp<int64_t>(last + 1 - first, 0, count));
}

// Hides the keys that a query does not see, of `count` from `first` on, and adds its biases.
inline void mask_row(const AttentionArguments& a, int64_t batch, int64_t head, int64_t query,
                     int first, int count, float* logits) {
  const int seen = visible_keys(a, query, first, count);
  std::fill(logits + seen, logits + count, -kInfinity);
  mask_logits(a, batch, head, query, first, seen, logits);
  add_row_bias(a, batch, head / (a.query_heads / a.kv_heads), first, seen, logits);
}
