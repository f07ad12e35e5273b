import Foundation
import MLX
import MLXNN

/// A value of a model's config.json.
public enum StringOrNumber: Codable, Equatable, Sendable {
    case string(String)
    case int(Int)
    case float(Float)

    public init(from decoder: any Decoder) throws {
        let value = try decoder.singleValueContainer()
        if let number = try? value.decode(Int.self) {
            self = .int(number)
        } else if let number = try? value.decode(Float.self) {
            self = .float(number)
        } else {
            self = .string(try value.decode(String.self))
        }
    }

    public func encode(to encoder: any Encoder) throws {
        var value = encoder.singleValueContainer()
        switch self {
        case .string(let text): try value.encode(text)
        case .int(let number): try value.encode(number)
        case .float(let number): try value.encode(number)
        }
    }

    public func asFloat() -> Float? {
        switch self {
        case .string: nil
        case .int(let number): Float(number)
        case .float(let number): number
        }
    }
}

public typealias RoPELayer = OffsetLayer

/// The rotary embedding of a model; supports the original's kinds "default", "linear" and "llama3".
public func initializeRope(
    dims: Int, base: Float, traditional: Bool, scalingConfig: [String: StringOrNumber]?,
    maxPositionEmbeddings: Int?
) -> any RoPELayer {
    let kind = scalingConfig?["type"] ?? scalingConfig?["rope_type"] ?? .string("default")
    let scaling = scalingConfig ?? [:]
    switch kind {
    case .string("default"):
        return RoPE(dimensions: dims, traditional: traditional, base: base)
    case .string("linear"):
        let factor = scaling["factor"]?.asFloat() ?? 1
        return RoPE(dimensions: dims, traditional: traditional, base: base, scale: 1 / factor)
    case .string("llama3"):
        return Llama3RoPE(dims: dims, traditional: traditional, base: base, scaling)
    default: fatalError("rope_scaling of the kind \(kind) is not part of the Linux build")
    }
}

/// A rotary embedding whose low frequencies are reduced.
private final class Llama3RoPE: Module, OffsetLayer {
    private let dims: Int
    private let traditional: Bool
    private let periods: [Float]

    init(dims: Int, traditional: Bool, base: Float, _ scaling: [String: StringOrNumber]) {
        self.dims = dims
        self.traditional = traditional
        let factor = scaling["factor"]?.asFloat() ?? 1
        let (low, high) = (
            scaling["low_freq_factor"]?.asFloat() ?? 1, scaling["high_freq_factor"]?.asFloat() ?? 4
        )
        let context = scaling["original_max_position_embeddings"]?.asFloat() ?? 8192
        periods = stride(from: 0, to: dims, by: 2).map { place in
            let period = Foundation.pow(base, Float(place) / Float(dims))
            let waves = context / (2 * .pi * period)
            if waves < low { return period * factor }
            if waves > high { return period }
            let smooth = (waves - low) / (high - low)
            return period / ((1 - smooth) / factor + smooth)
        }
    }

    func callAsFunction(_ x: MLXArray, offset: Int) -> MLXArray {
        MLXFast.rope(
            x, dimensions: dims, traditional: traditional, base: nil, scale: 1, offset: offset,
            freqs: MLXArray(periods))
    }
}

/// Applies the rotary embedding at the positions that the cache gives.
public func applyRotaryPosition(
    _ rope: any RoPELayer, to x: MLXArray, offset: RoPEOffset?
) -> MLXArray {
    switch offset {
    case .scalar(let offset): rope(x, offset: offset)
    case nil: rope(x, offset: 0)
    case .batch: fatalError("sequences of different offsets are not part of the Linux build")
    }
}

/// The mask of the next tokens `h` [B, L, ...], from the cache if there is one.
public func createAttentionMask(
    h: MLXArray, cache: KVCache?, windowSize: Int? = nil, returnArray: Bool = false
) -> MLXFast.ScaledDotProductAttentionMaskMode {
    makeAttentionMask(n: h.dim(1), cache: cache, windowSize: windowSize, returnArray: returnArray)
}
