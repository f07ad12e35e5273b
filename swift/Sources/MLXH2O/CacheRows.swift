import MLX

/// Rows as `MLX.quantized` packs them: uint32 words, and a scale and a bias for each group of
/// elements.
public struct PackedRows {
    /// uint32 [B, H, N, D * bits / 32].
    public let words: MLXArray
    /// [B, H, N, D / groupSize], float32, float16 or bfloat16.
    public let scales: MLXArray
    /// As the scales.
    public let biases: MLXArray

    public init(words: MLXArray, scales: MLXArray, biases: MLXArray) {
        self.words = words
        self.scales = scales
        self.biases = biases
    }
}

/// Keys or values of a cache: an array [B, H, N, D], or ``PackedRows``.
///
/// An operation takes keys and values of the same kind, and returns them as they came.
public protocol CacheRows {
    /// The array, or words, scales and biases.
    var parts: [MLXArray] { get }

    /// The rows of so many parts.
    static func rows(of parts: [MLXArray]) -> Self
}

extension MLXArray: CacheRows {
    public var parts: [MLXArray] { [self] }

    public static func rows(of parts: [MLXArray]) -> MLXArray { parts.first ?? .mlxNone }
}

extension PackedRows: CacheRows {
    public var parts: [MLXArray] { [words, scales, biases] }

    public static func rows(of parts: [MLXArray]) -> PackedRows {
        guard parts.count == 3 else {
            return PackedRows(words: .mlxNone, scales: .mlxNone, biases: .mlxNone)
        }
        return PackedRows(words: parts[0], scales: parts[1], biases: parts[2])
    }
}
