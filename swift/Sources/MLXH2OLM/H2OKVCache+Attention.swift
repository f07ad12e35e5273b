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
    /// attention, as dense rows without scores do, and computes its scores separately.
    func attend(
        _ queries: MLXArray, _ newKeys: MLXArray, _ newValues: MLXArray, _ scale: Float,
        _ mask: MLXFast.ScaledDotProductAttentionMaskMode
    ) throws -> MLXArray {
        try allOrNothing([self]) {
            try appendRows(newKeys, newValues)
            guard var table else { return queries }
            let output: MLXArray
            let several = table.segments.count > 1
            // MLX's own attention neither returns scores nor adds biases.
            let isOurs = policy.needsScores || table.bias != nil
            if queries.dim(2) > maxDecodeQueries || (several && mask.mask != nil)
                || (table.tail.packing == nil && !several && !isOurs)
            {
                let rows = try table.dense(newest: (newKeys, newValues))
                output = try attendByChunk(queries, rows, scale, mask, &table)
            } else if let kind = policy.kind, reach == 0, !several,
                // Scores of rows in a frame lack a shift, which needs the mask argument for itself.
                // Weights do not depend on the shift.
                !mask.masks || kind == .mass || table.frame == nil
            {
                output = try attendAndAccumulate(queries, scale, mask, kind, &table)
            } else if isOurs {
                let found = try attention(3, queries, scale, mask, table)
                try takeIn(found[2], lse: found[1], isMasked: mask.masks, &table)
                output = found[0]
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
                try MLXFast.attention(
                    1, arrays[0], [arrays[1]], [arrays[2]], nil, scale, mask, rowBias: bias)[0]
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
        let (packing, frame) = (table.tail.packing, table.frame)
        let (asked, keys, values) = table.tail.read(by: frame?.rotated(queries) ?? queries)
        let shift = kind == .ema ? frame?.shift(queries, scale: scale) : nil
        let mask = shift.map { .array($0) } ?? mask
        let found = try attentionAndAccumulate(
            queries: asked, keys: keys, values: values, importance: table.importance,
            scale: scale, kind: kind, decay: policy.averageDecay ?? 0, mask: mask,
            rowBias: table.bias, bits: packing?.bits ?? 8, groupSize: packing?.groupSize ?? 64,
            valueBits: packing?.valueBits, sparseVThreshold: configuration.format.sparseV)
        table.importance = found.importance
        return frame?.valuesBack(found.output) ?? found.output
    }

    /// The first `count` of output, lse and scores over the stored rows.
    private func attention(
        _ count: Int, _ queries: MLXArray, _ scale: Float,
        _ mask: MLXFast.ScaledDotProductAttentionMaskMode, _ table: RowTable
    ) throws -> [MLXArray] {
        let segments = table.segments.filter { $0.length > 0 }
        let asked = table.frame?.rotated(queries) ?? queries
        let each = try segments.indices.map { index in
            let (queries, keys, values) = segments[index].read(by: asked)
            // The new rows are all in the last one.
            return try MLXFast.attention(
                segments.count > 1 ? max(2, count) : count, queries, keys.parts, values.parts,
                segments[index].packing, scale, index == segments.count - 1 ? mask : .none,
                rowBias: table.bias, sparseV: configuration.format.sparseV)
        }
        var found = each.count > 1 ? merged(each) : each[0]
        guard let frame = table.frame else { return found }
        found[0] = frame.valuesBack(found[0])
        guard count > 1 else { return found }
        let shift = frame.shift(queries, scale: scale)
        return [found[0], found[1] + shift.squeezed(axis: -1), found[2] + shift]
    }
}

/// Output, lse and scores over all rows, of those over parts of them: outputs are averaged by the
/// shares that the parts have in the common denominator.
private func merged(_ parts: [[MLXArray]]) -> [MLXArray] {
    let lses = stacked(parts.map { $0[1] }, axis: -1)
    let shares = weights(of: lses, lse: nil).expandedDimensions(axis: -2)
    let output = (stacked(parts.map { $0[0] }, axis: -1) * shares).sum(axis: -1)
    let scores = parts[0].count > 2 ? [concatenated(parts.map { $0[2] }, axis: -1)] : []
    return [output.asType(parts[0][0].dtype), logSumExp(lses, axis: -1)] + scores
}

extension MLXFast.ScaledDotProductAttentionMaskMode {
    var masks: Bool { if case .none = self { false } else { true } }
}

/// Converted to one dtype, as MLX's own attention does.
func sameDType(_ arrays: [MLXArray]) -> [MLXArray] {
    guard Set(arrays.map(\.dtype)).count > 1 else { return arrays }
    return arrays.map { $0.asType(.float32) }
}
