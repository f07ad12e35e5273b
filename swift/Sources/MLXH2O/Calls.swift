import CMLXH2O
import Cmlx
import MLX

// How the operations of this module call C: places for results, vectors, optional numbers.

/// Runs a C operation with places for `count` arrays, on the back end of this task, and throws what
/// it reports.
func results(
    _ count: Int, _ body: (UnsafeMutablePointer<mlx_array>) -> Int32
) throws -> [MLXArray] {
    var places = (0..<count).map { _ in mlx_array_new() }
    do {
        try H2OError.catching {
            H2OBackend.applyCurrent()
            places.withUnsafeMutableBufferPointer { buffer in
                if let base = buffer.baseAddress { _ = body(base) }
            }
        }
    } catch {
        for place in places { mlx_array_free(place) }
        throw error
    }
    return places.map { MLXArray($0) }
}

/// Calls `body` with the arrays as C takes them.
func withVector<R>(_ arrays: [MLXArray], _ body: (mlx_vector_array) throws -> R) rethrows -> R {
    let vector = mlx_vector_array_new()
    defer { mlx_vector_array_free(vector) }
    for array in arrays { mlx_vector_array_append_value(vector, array.ctx) }
    return try body(vector)
}

/// Calls `body` with places for two vectors, and returns the arrays that it wrote there.
func vectorResults(
    _ body: (UnsafeMutablePointer<mlx_vector_array>, UnsafeMutablePointer<mlx_vector_array>) throws
        -> Void
) rethrows -> ([MLXArray], [MLXArray]) {
    var (first, second) = (mlx_vector_array_new(), mlx_vector_array_new())
    defer {
        mlx_vector_array_free(first)
        mlx_vector_array_free(second)
    }
    try body(&first, &second)
    return (items(of: first), items(of: second))
}

private func items(of vector: mlx_vector_array) -> [MLXArray] {
    (0..<mlx_vector_array_size(vector)).map {
        var array = mlx_array_new()
        mlx_vector_array_get(&array, vector, $0)
        return MLXArray(array)
    }
}

func optional(_ number: Int?) -> mlx_optional_int {
    mlx_optional_int(value: Int32(clamping: number ?? 0), has_value: number != nil)
}

extension MLXFast.ScaledDotProductAttentionMaskMode {
    /// The mode and the array as the C functions take them.
    var arguments: (mode: String, array: MLXArray) {
        mask.map { ("array", $0) } ?? (mode, .mlxNone)
    }
}
