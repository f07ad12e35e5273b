import MLX

/// Key diversity, and a little attention mass: four times the place of a row by ``KeyDiffPolicy``,
/// and its place by ``H2OSumPolicy``.
///
/// Places and not values are added, since a cosine and a mass have no common scale; their sum is
/// whole, so that ties are ties. Reads all keys once per eviction, and sorts.
public struct MixPolicy: EvictionPolicy {
    private static let diversityShare: Float = 4

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
        let diversity = try places(of: keyDiversity(rows.keys), positions: rows.positions)
        let mass = try places(of: rows.importance, positions: rows.positions)
        let mixed = diversity * Self.diversityShare + mass
        return which(isNaN(rows.importance), Float.nan, mixed)
    }
}
