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
  switch (a.mask_type) {
    case MaskType::none:
      return;
    case MaskType::boolean:
      return by(static_cast<const uint8_t*>(a.mask));
    case MaskType::float32:
      return by(static_cast<const float*>(a.mask));
    case MaskType::float16:
      return by(static_cast<const Float16*>(a.mask));
    case MaskType::bfloat16:
      return by(static_cast<const BFloat16*>(a.mask));
  }
}
