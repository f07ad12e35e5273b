import MLX
import MLXH2O
import MLXLMCommon

/// Append to the cache, if there is one, and attend; pass the scores to a cache that needs them.
///
/// It has the name and arguments of mlx-swift-lm's function, and calls that for every cache that is
/// not ``H2OScoreTracking``. A model evicts once its source says `import func
/// MLXH2OLM.attentionWithCacheUpdate`.
///
/// Up to 8 queries, one operation returns output and scores. A longer chunk takes its output from
/// MLX's own attention, and computes separately only what the policy needs, without a matrix of all
/// queries by all rows. The scores are tied to the output: evaluating it evaluates them. Errors are
/// reported to MLX's error handler (`withError` throws them), and the queries are returned.
///
/// - Parameters:
///   - queries: [B, Hq, L, D]
///   - keys: the new keys, [B, Hkv, L, D], with RoPE applied
///   - values: the new values, [B, Hkv, L, Dv]
///   - cache: the cache of this layer
///   - scale: factor of the products
///   - mask: over the rows that the update returns
/// - Returns: [B, Hq, L, Dv]
public func attentionWithCacheUpdate(
    queries: MLXArray, keys: MLXArray, values: MLXArray, cache: KVCache?, scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode = .none
) -> MLXArray {
    reported(else: queries) {
        if let cache = cache as? H2OKVCache {
            return try cache.attend(queries, keys, values, scale, mask)
        }
        if let groups = cache as? HeadGroupsKVCache {
            return try groups.attend(queries, keys, values, scale, mask)
        }
        if let tracking = cache as? any H2OScoreTracking, tracking.needsScores {
            return try attend(queries, keys, values, tracking, scale, mask)
        }
        return MLXLMCommon.attentionWithCacheUpdate(
            queries: queries, keys: keys, values: values, cache: cache, scale: scale, mask: mask)
    }
}

/// For other packages' caches that need scores.
private func attend(
    _ queries: MLXArray, _ newKeys: MLXArray, _ newValues: MLXArray,
    _ cache: any H2OScoreTracking, _ scale: Float, _ mask: MLXFast.ScaledDotProductAttentionMaskMode
) throws -> MLXArray {
    let (keys, values) = cache.update(keys: newKeys, values: newValues)
    let rows = sameDType([queries, keys, values])
    let output: MLXArray
    let scores: MLXArray
    if queries.dim(2) <= maxDecodeQueries {
        (output, scores) = try MLXFast.scaledDotProductAttentionWithScores(
            queries: rows[0], keys: rows[1], values: rows[2], scale: scale, mask: mask)
    } else {
        output = MLXFast.scaledDotProductAttention(
            queries: rows[0], keys: rows[1], values: rows[2], scale: scale, mask: mask)
        scores = try lastScores(
            rows[0], rows[1], scale: scale, mask: mask, bias: nil, count: maxScoredQueries)
    }
    cache.updateScores(scores, isMasked: mask.masks)
    return depends(input: output, dependencies: cache.trackedState)
}
