import MLX

/// Keep the rows with the most attention so far (Zhang et al. 2023, H2O, section 4).
///
/// The importance of a row is its attention mass: its weights, summed over all queries since it
/// came and over the query heads of the KV head. Nothing fades, so older rows have an advantage
/// that the recent window must make up for.
public struct H2OSumPolicy: EvictionPolicy {
    public init() {}

    public var needsScores: Bool { true }
    public var needsWeights: Bool { true }
    public var chunkQueries: Int? { nil }

    public func accumulate(
        _ importance: MLXArray, scores: MLXArray, positions: MLXArray, isMasked: Bool
    ) throws -> MLXArray {
        addedMass(importance, scores)
    }

    public func rank(_ rows: PolicyRows) throws -> MLXArray { rows.importance }
}
