import MLX

/// Keep the rows whose keys differ most from the average key.
///
/// The rank of a row is minus the cosine of its key with the mean normalised key of its head, over
/// all rows stored at the eviction, in float32. It needs no scores.
public struct KeyDiffPolicy: EvictionPolicy {
    /// It has no settings.
    public init() {}

    public func rank(_ rows: PolicyRows) throws -> MLXArray { try keyDiversity(rows.keys) }
}
