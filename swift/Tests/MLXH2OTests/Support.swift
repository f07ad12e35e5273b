import MLX

typealias Call = @Sendable () throws -> Void

func zeros(_ shape: [Int], _ dtype: DType = .float32) -> MLXArray {
    MLXArray.zeros(shape, dtype: dtype)
}

/// The greatest difference of two elements. Infinities and NaN must be in the same places.
func worst(_ found: MLXArray, _ expected: MLXArray) -> Float {
    zip(found.asArray(Float.self), expected.asArray(Float.self)).reduce(0) { worst, pair in
        if pair.0 == pair.1 || (pair.0.isNaN && pair.1.isNaN) { return worst }
        let difference = abs(pair.0 - pair.1)
        return difference.isNaN ? .infinity : max(worst, difference)
    }
}
