import MLX
import MLXH2O

// What a policy makes of the scores of one attention: of scores that are there, or of a chunk.

extension EvictionPolicy {
    /// The importance of the stored rows, float32 [B, H, N], after these scores.
    func importance(
        of table: RowTable, scores: MLXArray, lse: MLXArray?, isMasked: Bool
    ) throws -> MLXArray {
        guard needsScores else { return table.importance }
        let first = max(0, scores.dim(2) - (chunkQueries ?? scores.dim(2)))
        let counted = scores[0..., 0..., first...]
        let taken =
            needsWeights ? weights(of: counted, lse: lse.map { $0[0..., 0..., first...] }) : counted
        return try accumulate(
            table.importance, scores: taken, positions: table.positions, isMasked: isMasked)
    }

    /// The same of a long chunk whose attention returned no scores; where the policy allows it
    /// without a matrix of all queries by all keys.
    func importance(
        of table: RowTable, afterChunk queries: MLXArray, keys: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode
    ) throws -> MLXArray {
        if let averageDecay {
            return try prefillScores(
                queries: queries, keys: keys, scale: scale, mask: mask,
                importance: table.importance, decay: averageDecay)
        }
        guard needsScores else { return table.importance }
        guard let chunkQueries else {
            let mass = try prefillScores(
                queries: queries, keys: keys, scale: scale, mask: mask, kind: .mass)
            return try accumulate(
                table.importance, scores: mass.expandedDimensions(axis: 2),
                positions: table.positions, isMasked: true)
        }
        let scores = try lastScores(queries, keys, scale: scale, mask: mask, count: chunkQueries)
        return try importance(of: table, scores: scores, lse: nil, isMasked: true)
    }
}

/// `exp(scores - lse)`, 0 where a query sees nothing; without an lse that of these scores.
private func weights(of scores: MLXArray, lse: MLXArray?) -> MLXArray {
    if let lse = lse?.expandedDimensions(axis: -1) {
        return which(lse .== -Float.infinity, Float(0), (scores - lse).exp())
    }
    let greatest = scores.max(axis: -1, keepDims: true)
    // Where a query sees nothing, -inf - -inf would be NaN.
    let peak = which(greatest .== -Float.infinity, Float(0), greatest)
    let parts = (scores - peak).exp()
    let total = parts.sum(axis: -1, keepDims: true)
    return which(total .== Float(0), Float(0), parts / total)
}

/// Scores of the last `count` queries, float32 [B, Hq, at most count, N].
func lastScores(
    _ queries: MLXArray, _ keys: MLXArray, scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode, count: Int
) throws -> MLXArray {
    let length = queries.dim(2)
    let first = max(0, length - count)
    // The composed back end is lazy: its output, and so the values, are never computed.
    return try withBackend(.composed) {
        try MLXFast.scaledDotProductAttentionWithScores(
            queries: queries[0..., 0..., first...], keys: keys, values: keys, scale: scale,
            mask: part(of: mask, first..<length, of: length)
        ).1
    }
}

/// The part of a mask that concerns some of the queries; causal ones fit as they are.
func part(
    of mask: MLXFast.ScaledDotProductAttentionMaskMode, _ queries: Range<Int>, of length: Int
) -> MLXFast.ScaledDotProductAttentionMaskMode {
    guard let array = mask.mask, array.ndim > 1, array.dim(-2) == length else { return mask }
    return .array(array[.ellipsis, queries, 0...])
}
