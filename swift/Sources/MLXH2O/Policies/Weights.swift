import MLX

// What several policies make of attention weights. Not a policy itself.

/// Weights [B, Hq, L, N] as [B, H, Hq / H, L, N]: the query heads of each KV head.
func perKVHead(_ weights: MLXArray, heads: Int) -> MLXArray {
    let shape = weights.shape
    return weights.reshaped([shape[0], heads, shape[1] / heads, shape[2], shape[3]])
}

/// `importance` [B, H, N] plus the weights of all queries and query heads; NaN counts as 0.
func addedMass(_ importance: MLXArray, _ weights: MLXArray) -> MLXArray {
    let mass = perKVHead(weights, heads: importance.dim(1)).sum(axes: [2, 3])
    return which(isNaN(importance), Float(0), importance) + mass
}
