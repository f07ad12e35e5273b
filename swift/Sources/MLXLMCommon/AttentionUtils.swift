import MLX

/// Append to the cache, if there is one, and attend: what models of mlx-swift-lm call.
///
/// The original also serves quantised caches; those are not part of the Linux build.
///
/// - Parameters:
///   - queries: [B, Hq, L, D]
///   - keys: the new keys, [B, Hkv, L, D]
///   - values: the new values, [B, Hkv, L, Dv]
/// - Returns: [B, Hq, L, Dv]
public func attentionWithCacheUpdate(
    queries: MLXArray, keys: MLXArray, values: MLXArray, cache: KVCache?, scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode = .none
) -> MLXArray {
    let (keys, values) = cache?.update(keys: keys, values: values) ?? (keys, values)
    return MLXFast.scaledDotProductAttention(
        queries: queries, keys: keys, values: values, scale: scale, mask: mask)
}
