import MLX

/// Attention mass times the L1 norm of the value (Guo et al. 2024, VATP).
///
/// What a row adds to an output is weight times value: a row with much attention and a value near
/// zero, as the first token of many models, adds little. Reads all values once per eviction.
public struct ValueAwarePolicy: EvictionPolicy {
    public init() {}

    public var needsScores: Bool { true }
    public var needsWeights: Bool { true }
    public var chunkQueries: Int? { nil }

    public func accumulate(
        _ importance: MLXArray, scores: MLXArray, positions: MLXArray, isMasked: Bool
    ) throws -> MLXArray {
        addedMass(importance, scores)
    }

    public func rank(_ rows: PolicyRows) throws -> MLXArray {
        try rows.importance * abs(rows.values.asType(.float32)).sum(axis: -1)
    }
}
