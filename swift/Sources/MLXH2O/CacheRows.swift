import Cmlx
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

    /// From parts of the same rows; the operation that takes them checks them.
    public init(words: MLXArray, scales: MLXArray, biases: MLXArray) {
        self.words = words
        self.scales = scales
        self.biases = biases
    }
}

/// Rows as codes of rotated directions and norms (docs/design.md): 2, 3 or 4 bits, for rows whose
/// size is a power of two from 32 to 1,024.
public struct CodedRows {
    /// uint32 [B, H, N, D * bits / 32].
    public let words: MLXArray
    /// float32 [B, H, N, 1].
    public let norms: MLXArray

    /// From parts of the same rows; the operation that takes them checks them.
    public init(words: MLXArray, norms: MLXArray) {
        self.words = words
        self.norms = norms
    }
}

/// Keys or values of a cache: an array [B, H, N, D], ``PackedRows`` or ``CodedRows``.
///
/// An operation returns keys and values in the format that it got. Both have the same format,
/// except that either of them can be combined with ``CodedRows``.
public protocol CacheRows {
    /// The array, or words, scales and biases, or words and norms.
    var parts: [MLXArray] { get }

    /// The rows with these parts.
    static func rows(of parts: [MLXArray]) -> Self
}

extension MLXArray: CacheRows {
    public var parts: [MLXArray] { [self] }

    public static func rows(of parts: [MLXArray]) -> MLXArray { parts.first ?? .mlxNone }
}

extension PackedRows: CacheRows {
    public var parts: [MLXArray] { [words, scales, biases] }

    public static func rows(of parts: [MLXArray]) -> PackedRows {
        parts.count == 3
            ? PackedRows(words: parts[0], scales: parts[1], biases: parts[2])
            : PackedRows(words: .mlxNone, scales: .mlxNone, biases: .mlxNone)
    }
}

extension CodedRows: CacheRows {
    public var parts: [MLXArray] { [words, norms] }

    public static func rows(of parts: [MLXArray]) -> CodedRows {
        guard parts.count == 2 else { return CodedRows(words: .mlxNone, norms: .mlxNone) }
        return CodedRows(words: parts[0], norms: parts[1])
    }
}

extension MLXArray {
    /// The first rows of [B, H, N, ...], or all if there are not more. Like a range subscript, but
    /// faster, which counts because every step does this several times.
    package func rows(upTo count: Int, stream: StreamOrDevice = .default) -> MLXArray {
        guard dim(2) > count else { return self }
        var stop = shape.map { Int32(clamping: $0) }
        stop[2] = Int32(clamping: count)
        let (zeros, ones) = ([Int32](repeating: 0, count: ndim), [Int32](repeating: 1, count: ndim))
        var result = mlx_array_new()
        mlx_slice(&result, ctx, zeros, ndim, stop, ndim, ones, ndim, stream.ctx)
        return MLXArray(result)
    }

    /// Another array, with `rows` written from slot `start` on.
    package func writing(
        _ rows: MLXArray, from start: Int, stream: StreamOrDevice = .default
    ) -> MLXArray {
        var stop = shape.map { Int32(clamping: $0) }
        stop[2] = Int32(clamping: start + rows.dim(2))
        let first = (0..<ndim).map { $0 == 2 ? Int32(clamping: start) : 0 }
        let ones = [Int32](repeating: 1, count: ndim)
        var result = mlx_array_new()
        mlx_slice_update(&result, ctx, rows.ctx, first, ndim, stop, ndim, ones, ndim, stream.ctx)
        return MLXArray(result)
    }
}
