import MLX

/// Keep the rows that the last query attends to (Oren et al. 2024, TOVA).
///
/// The importance of a row is the weight that the last query gave it, averaged over the query heads
/// of the KV head. The paper averages over all heads of the layer and protects no window.
public struct TovaPolicy: EvictionPolicy {
    public init() {}

    public var needsScores: Bool { true }
    public var needsWeights: Bool { true }
    public var chunkQueries: Int? { 1 }

    public func accumulate(
        _ importance: MLXArray, scores: MLXArray, positions: MLXArray, isMasked: Bool
    ) throws -> MLXArray {
        let last = scores[0..., 0..., (scores.dim(2) - 1)..., 0...]
        return perKVHead(last, heads: importance.dim(1)).mean(axis: 2).squeezed(axis: 2)
    }

    public func rank(_ rows: PolicyRows) throws -> MLXArray { rows.importance }
}
