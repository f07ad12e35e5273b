import MLX

/// Keep what the last queries of the prompt attend to (Li et al. 2024, SnapKV).
///
/// A chunk of 32 queries or more sets the importance anew: the mean weight that its last 32 gave to
/// a row, and of the rows within 3 places of it, by position, the greatest of these, so that a row
/// stays with its neighbours. The paper evicts once, behind the prompt; here rows go at every token
/// of the answer too, so the window moves on: `C = 31/32 C + 1/32 w` for each further query, where
/// the first weight of a row sets `C`.
public struct SnapKVPolicy: EvictionPolicy {
    private static let window = 32
    private static let neighbours = 3

    public init() {}

    public var needsScores: Bool { true }
    public var needsWeights: Bool { true }
    public var chunkQueries: Int? { Self.window }

    public func accumulate(
        _ importance: MLXArray, scores: MLXArray, positions: MLXArray, isMasked: Bool
    ) throws -> MLXArray {
        let queries = scores.dim(2)
        guard queries >= Self.window else {
            return try accumulateScores(
                importance, scores: scores, decay: 1 - 1 / Double(Self.window), isMasked: false)
        }
        let last = scores[0..., 0..., (queries - Self.window)..., 0...]
        let votes = perKVHead(last, heads: importance.dim(1)).mean(axes: [2, 3])
        let order = argSort(positions, axis: 2)
        let pooled = Self.greatest(takeAlong(votes, order, axis: 2))
        return putAlong(votes, order, values: pooled, axis: 2)
    }

    public func rank(_ rows: PolicyRows) throws -> MLXArray { rows.importance }

    /// The greatest vote of each row and its neighbours, in order of position.
    private static func greatest(_ votes: MLXArray) -> MLXArray {
        let rows = votes.dim(2)
        let shape = Array(votes.shape.dropLast()) + [neighbours]
        let beyond = MLXArray.full(shape, values: MLXArray(-Float.infinity), dtype: .float32)
        let wide = concatenated([beyond, votes, beyond], axis: 2)
        return (0...2 * neighbours).reduce(votes) { result, start in
            maximum(result, wide[0..., 0..., start..<start + rows])
        }
    }
}
