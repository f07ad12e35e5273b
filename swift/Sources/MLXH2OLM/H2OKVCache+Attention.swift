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
            } else if let kind = policy.kind, reach == 0,
                // Scores of rows in a frame lack a shift, which needs the mask argument for itself.
                // Weights do not depend on the shift.
                !mask.masks || kind == .mass || table.frame == nil
            {
                output = try attendAndAccumulate(queries, scale, mask, kind, &table)
            } else if policy.needsScores || table.bias != nil {
                let found = try attention(3, queries, scale, mask, table)
                try takeIn(found[1], lse: found[2], isMasked: mask.masks, &table)
                output = found[0]
            } else if table.packing == nil {
                let rows = try promoted(queries, table)
                output = MLXFast.scaledDotProductAttention(
                    queries: rows[0], keys: rows[1], values: rows[2], scale: scale, mask: mask)
            } else {
                output = try attention(1, queries, scale, mask, table)[0]
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
                try MLXFast.attention(1, arrays[0], arrays[1], arrays[2], scale, mask, nil, bias)[0]
            } else {
                MLXFast.scaledDotProductAttention(
                    queries: arrays[0], keys: arrays[1], values: arrays[2], scale: scale, mask: mask
                )
            }
        try takeIn(chunk: arrays[0], keys: arrays[1], scale: scale, mask: mask, &table)
        return output
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
            queries: asked, keys: rows.map { Column.rows(of: [$0[1]]) } ?? keys,
            values: rows.map { Column.rows(of: [$0[2]]) } ?? values,
            importance: table.importance, scale: scale, kind: kind,
            decay: policy.averageDecay ?? 0, mask: mask, rowBias: table.bias,
            bits: packing?.bits ?? 8, groupSize: packing?.groupSize ?? 64,
            valueBits: packing?.valueBits, sparseVThreshold: configuration.format.sparseV)
        table.importance = found.importance
        return frame?.valuesBack(found.output) ?? found.output
    }

    /// The first `count` of output, scores and lse over the stored rows.
    private func attention(
        _ count: Int, _ queries: MLXArray, _ scale: Float,
        _ mask: MLXFast.ScaledDotProductAttentionMaskMode, _ table: RowTable
    ) throws -> [MLXArray] {
        let (bias, frame) = (table.bias, table.frame)
        guard let packing = table.packing else {
            let rows = try promoted(queries, table)
            return try MLXFast.attention(count, rows[0], rows[1], rows[2], scale, mask, nil, bias)
        }
        let (keys, values) = table.fetch()
        var found = try MLXFast.quantized(
            count, frame?.query(queries) ?? queries, keys.parts, values.parts, scale, packing.bits,
            packing.groupSize, packing.valueBits, mask, nil, bias, configuration.format.sparseV)
        guard let frame else { return found }
        found[0] = frame.valuesBack(found[0])
        guard count > 1 else { return found }
        let shift = frame.shift(queries, scale: scale)
        return [found[0], found[1] + shift, found[2] + shift.squeezed(axis: -1)]
    }

    /// Queries, keys and values of a dense table in one dtype.
    private func promoted(_ queries: MLXArray, _ table: RowTable) throws -> [MLXArray] {
        let (keys, values) = try table.dense()
        return sameDType([queries, keys, values])
    }
}

extension MLXFast.ScaledDotProductAttentionMaskMode {
    var masks: Bool { if case .none = self { false } else { true } }
}

/// Converted to one dtype, as MLX's own attention does.
func sameDType(_ arrays: [MLXArray]) -> [MLXArray] {
    guard Set(arrays.map(\.dtype)).count > 1 else { return arrays }
    return arrays.map { $0.asType(.float32) }
}
