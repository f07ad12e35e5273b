import MLX
import MLXH2O

/// Up to this many queries, the kernels return output and scores together.
let maxDecodeQueries = 8

// Attention over the rows of one cache, and passing its scores to the policy.
extension H2OKVCache {
    /// Append and attend.
    ///
    /// Up to 8 queries read packed rows as stored, and one operation computes attention and the new
    /// importance if there is such an operation. A longer chunk takes its output from MLX's own
    /// attention, and computes its scores separately.
    func attend(
        _ queries: MLXArray, _ newKeys: MLXArray, _ newValues: MLXArray, _ scale: Float,
        _ mask: MLXFast.ScaledDotProductAttentionMaskMode
    ) throws -> MLXArray {
        try allOrNothing([self]) {
            try appendRows(newKeys, newValues)
            guard var table else { return queries }
            let output: MLXArray
            if queries.dim(2) > maxDecodeQueries {
                let rows = try table.dense(newest: (newKeys, newValues))
                output = try attendByChunk(queries, rows, scale, mask, &table)
            } else if let kind = policy.kind, reach == 0, accumulates(kind, mask, table) {
                output = try attendAndAccumulate(queries, scale, mask, kind, &table)
            } else if policy.needsScores || table.bias != nil {
                let found = try attentionWithScores(queries, scale, mask, table)
                let isMasked = if case .none = mask { false } else { true }
                try takeIn(found.scores, lse: found.lse, isMasked: isMasked, &table)
                output = found.output
            } else {
                output = try attention(queries, scale, mask, table)
            }
            guard output.ndim == 4 else {  // an empty array, if MLX has reported an error
                throw H2OError("H2OKVCache.attend", "\(described) could not be attended to.")
            }
            self.table = table
            isUnscored = false
            return tied(output)
        }
    }

    private func attendByChunk(
        _ queries: MLXArray, _ rows: (keys: MLXArray, values: MLXArray), _ scale: Float,
        _ mask: MLXFast.ScaledDotProductAttentionMaskMode, _ table: inout RowTable
    ) throws -> MLXArray {
        let arrays = sameDType([queries, rows.keys, rows.values])
        let output =
            if let bias = table.bias {
                try MLXFast.attention(
                    1, arrays[0], arrays[1], arrays[2], scale, mask, nil, bias)[0]
            } else {
                MLXFast.scaledDotProductAttention(
                    queries: arrays[0], keys: arrays[1], values: arrays[2], scale: scale, mask: mask
                )
            }
        try takeIn(chunk: arrays[0], keys: arrays[1], scale: scale, mask: mask, &table)
        return output
    }

    /// Whether one operation can also accumulate: scores of rows in a frame lack a shift, which
    /// needs the mask argument for itself. Weights do not depend on the shift.
    private func accumulates(
        _ kind: ChunkScores, _ mask: MLXFast.ScaledDotProductAttentionMaskMode, _ table: RowTable
    ) -> Bool {
        if case .none = mask { true } else { kind == .mass || table.frame == nil }
    }

    /// Attention that also accumulates for the policy.
    private func attendAndAccumulate(
        _ queries: MLXArray, _ scale: Float,
        _ mask: MLXFast.ScaledDotProductAttentionMaskMode, _ kind: ChunkScores,
        _ table: inout RowTable
    ) throws -> MLXArray {
        let (packing, frame) = (table.packing, table.frame)
        let rows = packing == nil ? try promoted(queries, table) : nil
        let (keys, values) = table.fetch()
        let asked = rows?[0] ?? frame?.query(queries) ?? queries
        let shift = kind == .ema ? frame?.shift(queries, scale: scale) : nil
        let mask = shift.map { .array($0) } ?? mask
        let found = try attentionAndAccumulate(
            queries: asked, keys: StoredRows(parts: rows.map { [$0[1]] } ?? keys),
            values: StoredRows(parts: rows.map { [$0[2]] } ?? values),
            importance: table.importance, scale: scale, kind: kind,
            decay: policy.averageDecay ?? 0, mask: mask, rowBias: table.bias,
            bits: packing?.bits ?? 8, groupSize: packing?.groupSize ?? 64,
            valueBits: packing?.valueBits)
        table.importance = found.importance
        return frame?.valuesBack(found.output) ?? found.output
    }

    /// Attention without scores: MLX's own, or the fused one over packed rows.
    private func attention(
        _ queries: MLXArray, _ scale: Float, _ mask: MLXFast.ScaledDotProductAttentionMaskMode,
        _ table: RowTable
    ) throws -> MLXArray {
        guard let packing = table.packing else {
            let rows = try promoted(queries, table)
            return MLXFast.scaledDotProductAttention(
                queries: rows[0], keys: rows[1], values: rows[2], scale: scale, mask: mask)
        }
        let (keys, values) = table.fetch()
        let output = try MLXFast.scaledDotProductAttentionQuantizedWithScores(
            queries: table.frame?.query(queries) ?? queries, keys: StoredRows(parts: keys),
            values: StoredRows(parts: values), scale: scale, bits: packing.bits,
            groupSize: packing.groupSize, valueBits: packing.valueBits, mask: mask
        ).0
        return table.frame?.valuesBack(output) ?? output
    }

    private func attentionWithScores(
        _ queries: MLXArray, _ scale: Float, _ mask: MLXFast.ScaledDotProductAttentionMaskMode,
        _ table: RowTable
    ) throws -> AttentionWithScores {
        guard let packing = table.packing else {
            let rows = try promoted(queries, table)
            return try MLXFast.scaledDotProductAttentionWithScoresAndLse(
                queries: rows[0], keys: rows[1], values: rows[2], scale: scale, mask: mask,
                rowBias: table.bias)
        }
        let (keys, values) = table.fetch()
        let found = try MLXFast.scaledDotProductAttentionQuantizedWithScoresAndLse(
            queries: table.frame?.query(queries) ?? queries, keys: StoredRows(parts: keys),
            values: StoredRows(parts: values), scale: scale, bits: packing.bits,
            groupSize: packing.groupSize, valueBits: packing.valueBits, mask: mask,
            rowBias: table.bias
        ).0
        guard let frame = table.frame else { return found }
        let shift = frame.shift(queries, scale: scale)
        return AttentionWithScores(
            output: frame.valuesBack(found.output), scores: found.scores + shift,
            lse: found.lse + shift.squeezed(axis: -1))
    }

    /// Queries, keys and values of a dense table in one dtype.
    private func promoted(_ queries: MLXArray, _ table: RowTable) throws -> [MLXArray] {
        let (keys, values) = try table.dense()
        return sameDType([queries, keys, values])
    }
}

/// Converted to one dtype, as MLX's own attention does.
func sameDType(_ arrays: [MLXArray]) -> [MLXArray] {
    guard Set(arrays.map(\.dtype)).count > 1 else { return arrays }
    return arrays.map { $0.asType(.float32) }
}
