import MLX

// The layers of Llama and Qwen3, as mlx-swift declares them.

/// A module of one argument.
public protocol UnaryLayer: Module {
    func callAsFunction(_ x: MLXArray) -> MLXArray
}

/// A module whose result depends on the positions of the rows in their sequence.
public protocol OffsetLayer: Module {
    func callAsFunction(_ x: MLXArray, offset: Int) -> MLXArray
}

/// `x W^T + b`.
open class Linear: Module, UnaryLayer {
    public let weight: MLXArray
    public let bias: MLXArray?

    public init(_ inputDimensions: Int, _ outputDimensions: Int, bias: Bool = true) {
        weight = MLXArray.zeros([outputDimensions, inputDimensions], dtype: .float32)
        self.bias = bias ? MLXArray.zeros([outputDimensions], dtype: .float32) : nil
    }

    open func callAsFunction(_ x: MLXArray) -> MLXArray {
        let product = matmul(x, weight.transposed())
        return bias.map { product + $0 } ?? product
    }
}

/// One row of the weight per token.
open class Embedding: Module, UnaryLayer {
    public let weight: MLXArray

    public init(embeddingCount: Int, dimensions: Int) {
        weight = MLXArray.zeros([embeddingCount, dimensions], dtype: .float32)
    }

    open func callAsFunction(_ x: MLXArray) -> MLXArray { take(weight, x, axis: 0) }

    /// Uses the weight as the output layer of the model.
    open func asLinear(_ x: MLXArray) -> MLXArray { matmul(x, weight.transposed()) }
}

/// Rows divided by their root mean square, times a weight.
open class RMSNorm: Module, UnaryLayer {
    public let weight: MLXArray
    public let eps: Float

    public init(dimensions: Int, eps: Float = 1e-5) {
        weight = MLXArray.full([dimensions], values: MLXArray(Float(1)), dtype: .float32)
        self.eps = eps
    }

    open func callAsFunction(_ x: MLXArray) -> MLXArray {
        MLXFast.rmsNorm(x, weight: weight, eps: eps)
    }
}

/// The rotary embedding.
public final class RoPE: Module, OffsetLayer {
    private let dimensions: Int
    private let traditional: Bool
    private let base: Float
    private let scale: Float

    public init(
        dimensions: Int, traditional: Bool = false, base: Float = 10_000, scale: Float = 1
    ) {
        self.dimensions = dimensions
        self.traditional = traditional
        self.base = base
        self.scale = scale
    }

    public func callAsFunction(_ x: MLXArray, offset: Int) -> MLXArray {
        MLXFast.rope(
            x, dimensions: dimensions, traditional: traditional, base: base, scale: scale,
            offset: offset)
    }
}

/// `x * sigmoid(x)`.
public func silu(_ x: MLXArray) -> MLXArray { x * sigmoid(x) }
