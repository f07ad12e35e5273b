import MLX
import MLXH2O

/// Up to here the kernels return output and scores together.
let maxDecodeQueries = 8

// Attention over the rows of one cache: the output, and what the policy takes in of the scores.
extension H2OKVCache {
    /// Append and attend.
    ///
    /// Up to 8 queries packed rows are read as they are stored, and one operation serves attention
    /// and what the policy wants of it where there is such an operation. A longer chunk takes its
    /// output from MLX's own attention, and its scores beside it.
    func attend(
        _ queries: MLXArray, _ newKeys: MLXArray, _ newValues: MLXArray, _ scale: Float,
        _ mask: MLXFast.ScaledDotProductAttentionMaskMode
    ) throws -> MLXArray {
        try appendRows(newKeys, newValues)
        guard var store else { return queries }
        let output: MLXArray
        if queries.dim(2) > maxDecodeQueries {
            output = try attendByChunk(queries, scale, mask, &store)
        } else if store.packing != nil {
            output = try attendByFew(PackedRows.self, queries, scale, mask, &store)
        } else {
            output = try attendByFew(MLXArray.self, queries, scale, mask, &store)
        }
        self.store = store
        isUnscored = false
        return depends(input: output, dependencies: store.remembered)
    }

    private func attendByChunk(
        _ queries: MLXArray, _ scale: Float, _ mask: MLXFast.ScaledDotProductAttentionMaskMode,
        _ store: inout RowStore
    ) throws -> MLXArray {
        let (keys, values) = store.dense()
        let arrays = sameDType([queries, keys, values])
        let output = MLXFast.scaledDotProductAttention(
            queries: arrays[0], keys: arrays[1], values: arrays[2], scale: scale, mask: mask)
        store.importance = try policy.importance(
            of: store, afterChunk: arrays[0], keys: arrays[1], scale: scale, mask: mask)
        return output
    }

    private func attendByFew<Rows: CacheRows>(
        _ kind: Rows.Type, _ queries: MLXArray, _ scale: Float,
        _ mask: MLXFast.ScaledDotProductAttentionMaskMode, _ store: inout RowStore
    ) throws -> MLXArray {
        let evictEvery = configuration.evictEvery
        let least = secondReadBytes ?? KeyRanks.secondReadBytes(evictEvery: evictEvery)
        if case .keyDiversity? = policy.rankedBy, isEvictionDue,
            store.canRankKeys(for: queries, scale: scale, secondReadBytes: least)
        {
            return try store.attendAndRank(
                kind, queries, scale: scale, mask: mask, sharedHeads: configuration.sharedHeads)
        }
        if let decay = policy.averageDecay {
            return try attendAndAverage(kind, queries, scale, mask, decay, &store)
        }
        guard policy.needsScores else { return try attention(queries, scale, mask, store) }
        let found = try attentionWithScores(queries, scale, mask, store)
        let isMasked = if case .none = mask { false } else { true }
        store.importance = try policy.importance(
            of: store, scores: found.scores, lse: found.lse, isMasked: isMasked)
        return found.output
    }

    /// Attention that takes its scores into the moving average, and names the row that goes next.
    private func attendAndAverage<Rows: CacheRows>(
        _ kind: Rows.Type, _ queries: MLXArray, _ scale: Float,
        _ mask: MLXFast.ScaledDotProductAttentionMaskMode, _ decay: Double,
        _ store: inout RowStore
    ) throws -> MLXArray {
        let rows = Rows.self == MLXArray.self ? promoted(queries, store) : nil
        let (keys, values) = store.fetch()
        let isNamed =
            isEvictionDue && configuration.evictEvery == 1 && !configuration.sharedHeads
        let next = isNamed ? zones(added: 1) : nil
        let found = try attentionAndAccumulate(
            queries: rows?[0] ?? queries, keys: Rows.rows(of: rows.map { [$0[1]] } ?? keys),
            values: Rows.rows(of: rows.map { [$0[2]] } ?? values), importance: store.importance,
            scale: scale, decay: decay, mask: mask,
            positions: next == nil ? nil : store.positions, sinkSize: next?.sinkSize ?? 0,
            recentStart: next?.recentStart, bits: store.packing?.bits ?? 8,
            groupSize: store.packing?.groupSize ?? 64, valueBits: store.packing?.valueBits)
        store.importance = found.importance
        if let worst = found.worst, let next {
            store.knownWorst = KnownWorst(slots: worst, zones: next)
        }
        return found.output
    }

    /// Attention without scores: MLX's own, or the fused one over packed rows.
    private func attention(
        _ queries: MLXArray, _ scale: Float, _ mask: MLXFast.ScaledDotProductAttentionMaskMode,
        _ store: RowStore
    ) throws -> MLXArray {
        guard let packing = store.packing else {
            let rows = promoted(queries, store)
            return MLXFast.scaledDotProductAttention(
                queries: rows[0], keys: rows[1], values: rows[2], scale: scale, mask: mask)
        }
        let (keys, values) = store.fetch()
        return try MLXFast.scaledDotProductAttentionQuantizedWithScores(
            queries: queries, keys: .rows(of: keys), values: .rows(of: values), scale: scale,
            bits: packing.bits, groupSize: packing.groupSize, valueBits: packing.valueBits,
            mask: mask
        ).0
    }

    private func attentionWithScores(
        _ queries: MLXArray, _ scale: Float, _ mask: MLXFast.ScaledDotProductAttentionMaskMode,
        _ store: RowStore
    ) throws -> AttentionWithScores {
        guard let packing = store.packing else {
            let rows = promoted(queries, store)
            return try MLXFast.scaledDotProductAttentionWithScoresAndLse(
                queries: rows[0], keys: rows[1], values: rows[2], scale: scale, mask: mask)
        }
        let (keys, values) = store.fetch()
        return try MLXFast.scaledDotProductAttentionQuantizedWithScoresAndLse(
            queries: queries, keys: .rows(of: keys), values: .rows(of: values), scale: scale,
            bits: packing.bits, groupSize: packing.groupSize, valueBits: packing.valueBits,
            mask: mask
        ).0
    }

    /// Queries, keys and values of a dense store in one dtype.
    private func promoted(_ queries: MLXArray, _ store: RowStore) -> [MLXArray] {
        let (keys, values) = store.dense()
        return sameDType([queries, keys, values])
    }
}

/// Promoted to one dtype, as MLX's own attention does.
func sameDType(_ arrays: [MLXArray]) -> [MLXArray] {
    guard Set(arrays.map(\.dtype)).count > 1 else { return arrays }
    return arrays.map { $0.asType(.float32) }
}
