import MLX

// The same float32 operations in the same order as python/mlx_h2o/ema.py, so that both keep the
// same rows: 1 - a is computed in double precision, then rounded once.

/// Queries of a chunk that are scored, counted from its end; at a = 0.95 older ones weigh 0.14 %.
public let maxScoredQueries = 128

/// `C = a*C + (1-a)*|s|` for each query in order; `s` is the mean over the unmasked query heads of
/// a group.
///
/// - Parameters:
///   - importance: C, float32 [B, H, N], NaN where a row has not been scored
///   - scores: float32 [B, Hq, L, N], -inf (or NaN) where masked
///   - isMasked: false promises that every score is finite
/// - Returns: float32 [B, H, N]; O(B * Hq * L * N) time and memory
func movingAverage(
    _ importance: MLXArray, scores: MLXArray, decay: Double, isMasked: Bool
) -> MLXArray {
    let (mean, unmasked) = groupMean(scores, heads: importance.dim(1), isMasked: isMasked)
    guard scores.dim(2) > 1 else {
        return oneQuery(
            importance, mean.squeezed(axis: 2), unmasked?.squeezed(axis: 2), decay: decay)
    }
    let all = MLXArray.full(mean.shape, values: MLXArray(true), dtype: .bool)
    return manyQueries(importance, mean, unmasked ?? all, decay: decay)
}

/// The mean over the unmasked query heads of each group, and which pairs have one: [B, H, L, N].
private func groupMean(
    _ scores: MLXArray, heads: Int, isMasked: Bool
) -> (MLXArray, MLXArray?) {
    let shape = scores.shape
    let group = shape[1] / heads
    let grouped = scores.reshaped([shape[0], heads, group, shape[2], shape[3]])
    guard isMasked else { return (grouped.sum(axis: 2) / Float(group), nil) }
    let seen = grouped .> -Float.infinity
    let count = seen.asType(.int32).sum(axis: 2)
    let mean = which(seen, grouped, Float(0)).sum(axis: 2) / maximum(count, 1)
    return (mean, count .> 0)
}

private func oneQuery(
    _ importance: MLXArray, _ mean: MLXArray, _ unmasked: MLXArray?, decay: Double
) -> MLXArray {
    let new = abs(mean)
    let average = Float(decay) * importance + Float(1 - decay) * new
    let result = which(isNaN(importance), new, average)
    return unmasked.map { which($0, result, importance) } ?? result
}

/// The recurrence unrolled: query i of a row weighs a^(unmasked queries after i).
private func manyQueries(
    _ importance: MLXArray, _ mean: MLXArray, _ unmasked: MLXArray, decay: Double
) -> MLXArray {
    let soFar = unmasked.asType(.int32).cumsum(axis: 2)
    let count = soFar[0..., 0..., (soFar.dim(2) - 1)...].squeezed(axis: 2)
    let unscored = isNaN(importance)
    // (1 - a) for every query but the one that sets the value of an unscored row.
    let sets = unscored.expandedDimensions(axis: 2) .&& (soFar .== 1)
    let share = which(sets, Float(1), Float(1 - decay))
    let weight = pow(
        Float(decay), (count.expandedDimensions(axis: 2) - soFar).asType(.float32))
    let added = which(unmasked, weight * share * abs(mean), Float(0)).sum(axis: 2)
    let kept = pow(Float(decay), count.asType(.float32)) * importance
    let result = which(unscored, added, kept + added)
    return which(count .> 0, result, importance)
}
