import MLX
import MLXH2O
import MLXLMCommon

/// Up to here the kernels return output and scores together.
private let maxDecodeQueries = 8

/// Append to the cache, if there is one, and attend; give the scores to a cache that asks for them.
///
/// It has the name and the arguments of mlx-swift-lm's function, and hands every cache that is not
/// ``H2OScoreTracking`` to that. A model evicts once its source says `import func
/// MLXH2OLM.attentionWithCacheUpdate`.
///
/// Up to 8 queries one operation returns output and scores. A longer chunk takes its output from
/// MLX's own attention, and the scores of its last 128 queries beside it, so that no matrix of all
/// queries by all rows is made. The scores are tied to the output: evaluating it evaluates them.
/// What goes wrong is reported to MLX's error handler (`withError` throws it), and the queries are
/// returned.
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
    do {
        if let cache = cache as? H2OKVCache, cache.isAttendedHere {
            return try cache.attend(queries, keys, values, scale, mask)
        }
        if let tracking = cache as? any H2OScoreTracking, tracking.needsScores {
            return try attend(queries, keys, values, tracking, scale, mask)
        }
    } catch {
        H2OError.report(error)
        return queries
    }
    return MLXLMCommon.attentionWithCacheUpdate(
        queries: queries, keys: keys, values: values, cache: cache, scale: scale, mask: mask)
}

extension H2OKVCache {
    /// Whether ``attend(_:_:_:_:_:)`` serves this cache: its policy's scores are a moving average,
    /// which one operation takes in with attention, or its rows are packed and need none.
    fileprivate var isAttendedHere: Bool {
        policy.averageDecay != nil || (configuration.kvBits != nil && !policy.needsScores)
    }

    /// Append and attend. Up to 8 queries packed rows are read as they are stored, and one operation
    /// serves attention and average; longer chunks take their scores beside MLX's own attention.
    fileprivate func attend(
        _ queries: MLXArray, _ newKeys: MLXArray, _ newValues: MLXArray, _ scale: Float,
        _ mask: MLXFast.ScaledDotProductAttentionMaskMode
    ) throws -> MLXArray {
        try appendRows(newKeys, newValues)
        guard var store else { return queries }
        let output: MLXArray
        let (keys, values) = store.fetch()
        if queries.dim(2) > maxDecodeQueries {
            let (keys, values) = store.dense()
            let arrays = sameDType([queries, keys, values])
            output = MLXFast.scaledDotProductAttention(
                queries: arrays[0], keys: arrays[1], values: arrays[2], scale: scale, mask: mask)
            if let decay = policy.averageDecay {
                store.importance = try prefillScores(
                    queries: arrays[0], keys: arrays[1], scale: scale, mask: mask,
                    importance: store.importance, decay: decay)
            }
        } else if store.packing != nil {
            output = try attendAndScore(
                PackedRows.self, queries, keys, values, scale, mask, &store)
        } else {
            let arrays = sameDType([queries, keys[0], values[0]])
            output = try attendAndScore(
                MLXArray.self, arrays[0], [arrays[1]], [arrays[2]], scale, mask, &store)
        }
        self.store = store
        isUnscored = false
        return depends(input: output, dependencies: trackedState)
    }

    private func attendAndScore<Rows: CacheRows>(
        _ kind: Rows.Type, _ queries: MLXArray, _ keys: [MLXArray], _ values: [MLXArray],
        _ scale: Float, _ mask: MLXFast.ScaledDotProductAttentionMaskMode, _ store: inout RowStore
    ) throws -> MLXArray {
        let (bits, groupSize) = (store.packing?.bits ?? 8, store.packing?.groupSize ?? 64)
        guard let decay = policy.averageDecay else {
            return try MLXFast.scaledDotProductAttentionQuantizedWithScores(
                queries: queries, keys: .rows(of: keys), values: .rows(of: values), scale: scale,
                bits: bits, groupSize: groupSize, valueBits: store.packing?.valueBits, mask: mask
            ).0
        }
        let found = try attentionAndAccumulate(
            queries: queries, keys: Rows.rows(of: keys), values: Rows.rows(of: values),
            importance: store.importance, scale: scale, decay: decay, mask: mask, bits: bits,
            groupSize: groupSize, valueBits: store.packing?.valueBits)
        store.importance = found.importance
        return found.output
    }
}

private func attend(
    _ queries: MLXArray, _ keys: MLXArray, _ values: MLXArray, _ cache: any H2OScoreTracking,
    _ scale: Float, _ mask: MLXFast.ScaledDotProductAttentionMaskMode
) throws -> MLXArray {
    let (keys, values) = try fetched(keys, values, cache)
    let arrays = sameDType([queries, keys, values])
    let (output, scores) = try outputAndScores(arrays[0], arrays[1], arrays[2], scale, mask)
    let isMasked = if case .none = mask { false } else { true }
    cache.updateScores(scores, isMasked: isMasked)
    return depends(input: output, dependencies: cache.trackedState)
}

/// All rows, after the update. An error of the update ends the call here.
private func fetched(
    _ keys: MLXArray, _ values: MLXArray, _ cache: any H2OScoreTracking
) throws -> (MLXArray, MLXArray) {
    if let cache = cache as? H2OKVCache { return try cache.append(keys: keys, values: values) }
    return cache.update(keys: keys, values: values)
}

private func outputAndScores(
    _ queries: MLXArray, _ keys: MLXArray, _ values: MLXArray, _ scale: Float,
    _ mask: MLXFast.ScaledDotProductAttentionMaskMode
) throws -> (MLXArray, MLXArray) {
    let length = queries.dim(2)
    if length <= maxDecodeQueries {
        return try MLXFast.scaledDotProductAttentionWithScores(
            queries: queries, keys: keys, values: values, scale: scale, mask: mask)
    }
    let output = MLXFast.scaledDotProductAttention(
        queries: queries, keys: keys, values: values, scale: scale, mask: mask)
    let first = max(0, length - maxScoredQueries)
    // The composed back end is lazy: its output is never computed.
    let (_, scores) = try withBackend(.composed) {
        try MLXFast.scaledDotProductAttentionWithScores(
            queries: queries[0..., 0..., first...], keys: keys, values: values, scale: scale,
            mask: lastRows(of: mask, length: length))
    }
    return (output, scores)
}

/// The part of a mask that concerns the last queries; causal ones fit as they are.
private func lastRows(
    of mask: MLXFast.ScaledDotProductAttentionMaskMode, length: Int
) -> MLXFast.ScaledDotProductAttentionMaskMode {
    guard let array = mask.mask, array.ndim > 1, array.dim(-2) == length else { return mask }
    return .array(array[.ellipsis, max(0, length - maxScoredQueries)..., 0...])
}

/// Promoted to one dtype, as MLX's own attention does.
private func sameDType(_ arrays: [MLXArray]) -> [MLXArray] {
    guard Set(arrays.map(\.dtype)).count > 1 else { return arrays }
    return arrays.map { $0.asType(.float32) }
}
