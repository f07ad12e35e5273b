import MLX

/// Keep the rows whose keys differ most from the average key.
///
/// The rank of a row is minus the cosine of its key with the mean normalised key of its head, over
/// all rows stored when rows must go, in float32. It needs no scores.
public struct KeyDiffPolicy: EvictionPolicy {
    public init() {}

    public func rank(_ rows: PolicyRows) -> MLXArray {
        let directions = normalised(rows.keys.asType(.float32))
        let mean = normalised(directions.mean(axis: 2, keepDims: true))
        let cosine = matmul(directions, mean.swappedAxes(-1, -2))
        return -cosine.squeezed(axis: -1)
    }

    /// A key of zeros gets the cosine 0, not NaN.
    private func normalised(_ vectors: MLXArray) -> MLXArray {
        let norm = sqrt(square(vectors).sum(axis: -1, keepDims: true))
        return vectors / maximum(norm, Float(1e-12))
    }
}
