import MLX
import MLXH2O
import MLXLMCommon

// How a policy accumulates the scores of one attention: existing scores, or those of a chunk.

extension EvictionPolicy {
    /// The input of ``accumulate(_:scores:positions:isMasked:)`` for scores [B, Hq, L, N]: the
    /// scores, or weights if the policy needs them.
    func seen(_ scores: MLXArray, lse: MLXArray?) -> MLXArray {
        needsWeights ? weights(of: scores, lse: lse) : scores
    }

    /// The value for a row that a query does not see.
    var unseen: Float { needsWeights ? 0 : -.infinity }

    /// The importance of rows, float32 [B, H, N], after accumulating ``seen(_:lse:)``; checked,
    /// since the policy may be an app's own.
    func folded(
        _ importance: MLXArray, _ positions: MLXArray, seen: MLXArray, isMasked: Bool
    ) throws -> MLXArray {
        let first = max(0, seen.dim(2) - (chunkQueries ?? seen.dim(2)))
        let found = try accumulate(
            importance, scores: seen[0..., 0..., first...], positions: positions,
            isMasked: isMasked)
        guard found.shape == importance.shape, found.dtype == .float32 else {
            throw H2OError(
                "\(type(of: self)).accumulate",
                "the importance is \(found.dtype) \(found.shape), expected float32 "
                    + "\(importance.shape).")
        }
        return found
    }

    /// The same after a long chunk whose attention returned no scores; if the policy allows it,
    /// without a matrix of all queries by all keys.
    func folded(
        _ importance: MLXArray, _ positions: MLXArray, chunk queries: MLXArray, keys: MLXArray,
        scale: Float, mask: MLXFast.ScaledDotProductAttentionMaskMode, bias: MLXArray?
    ) throws -> MLXArray {
        if let averageDecay {
            return try prefillScores(
                queries: queries, keys: keys, scale: scale, mask: mask, rowBias: bias,
                importance: importance, decay: averageDecay)
        }
        guard let chunkQueries else {
            let (some, mask, times) = sampled(queries, mask, rows: keys.dim(2))
            let mass = try prefillScores(
                queries: some, keys: keys, scale: scale, mask: mask, rowBias: bias, kind: .mass)
            let seen = (mass * times).expandedDimensions(axis: 2)
            return try folded(importance, positions, seen: seen, isMasked: true)
        }
        let scores = try lastScores(
            queries, keys, scale: scale, mask: mask, bias: bias, count: chunkQueries)
        return try folded(importance, positions, seen: seen(scores, lse: nil), isMasked: true)
    }
}

/// `exp(scores - lse)`, 0 for a query that sees nothing; without lse, with the lse of these scores.
func weights(of scores: MLXArray, lse: MLXArray?) -> MLXArray {
    if let lse = lse?.expandedDimensions(axis: -1) {
        return which(lse .== -Float.infinity, Float(0), (scores - lse).exp())
    }
    let greatest = scores.max(axis: -1, keepDims: true)
    // If a query sees nothing, -inf - -inf would be NaN.
    let peak = which(greatest .== -Float.infinity, Float(0), greatest)
    let parts = (scores - peak).exp()
    let total = parts.sum(axis: -1, keepDims: true)
    return which(total .== Float(0), Float(0), parts / total)
}

/// Scores of the last `count` queries, float32 [B, Hq, at most count, N].
func lastScores(
    _ queries: MLXArray, _ keys: MLXArray, scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode, bias: MLXArray?, count: Int
) throws -> MLXArray {
    let length = queries.dim(2)
    let first = max(0, length - count)
    // The composed back end is lazy: it never computes the output, and so needs no real values.
    return try withBackend(.composed) {
        try MLXFast.scaledDotProductAttentionWithScores(
            queries: queries[0..., 0..., first...], keys: keys, values: keys, scale: scale,
            mask: part(of: mask, first..<length, of: length), rowBias: bias
        ).1
    }
}

/// At least 512 of a chunk's queries, fewer than twice as many, at equal distances up to the last
/// one, with their mask; and for how many queries each stands.
private func sampled(
    _ queries: MLXArray, _ mask: MLXFast.ScaledDotProductAttentionMaskMode, rows: Int
) -> (MLXArray, MLXFast.ScaledDotProductAttentionMaskMode, Float) {
    let length = queries.dim(2)
    let step = length / 512
    guard step > 1 else { return (queries, mask, 1) }
    let some = MLXArray(stride(from: (length - 1) % step, to: length, by: step).map(Int32.init))
    var own = mask
    if case .causal = mask { own = .array(createCausalMask(n: length, offset: rows - length)) }
    if let every = own.mask, every.ndim > 1, every.dim(-2) == length {
        own = .array(take(every, some, axis: -2))
    }
    return (take(queries, some, axis: 2), own, Float(length) / Float(some.size))
}

/// The part of a mask for some of the queries and the first `rows`; causal masks stay as they are.
func part(
    of mask: MLXFast.ScaledDotProductAttentionMaskMode, _ queries: Range<Int>, of length: Int,
    rows: Int? = nil
) -> MLXFast.ScaledDotProductAttentionMaskMode {
    guard let array = mask.mask else { return mask }
    let ofRows = rows.map { array.dim(-1) == 1 ? array : array[.ellipsis, ..<$0] } ?? array
    guard array.ndim > 1, array.dim(-2) == length else { return .array(ofRows) }
    return .array(ofRows[.ellipsis, queries, 0...])
}
