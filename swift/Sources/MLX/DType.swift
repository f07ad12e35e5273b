import Cmlx

/// Element type of an ``MLXArray``.
public enum DType: Hashable, Sendable, CaseIterable {
    case bool
    case uint8
    case uint16
    case uint32
    case uint64
    case int8
    case int16
    case int32
    case int64
    case float16
    case float32
    case bfloat16
    case complex64
    case float64

    init(_ cmlxDtype: mlx_dtype) {
        self = DType.allCases.first { $0.cmlxDtype == cmlxDtype } ?? .float32
    }

    public var cmlxDtype: mlx_dtype {
        switch self {
        case .bool: MLX_BOOL
        case .uint8: MLX_UINT8
        case .uint16: MLX_UINT16
        case .uint32: MLX_UINT32
        case .uint64: MLX_UINT64
        case .int8: MLX_INT8
        case .int16: MLX_INT16
        case .int32: MLX_INT32
        case .int64: MLX_INT64
        case .float16: MLX_FLOAT16
        case .float32: MLX_FLOAT32
        case .bfloat16: MLX_BFLOAT16
        case .complex64: MLX_COMPLEX64
        case .float64: MLX_FLOAT64
        }
    }

    public var isFloatingPoint: Bool {
        switch self {
        case .float16, .float32, .bfloat16, .complex64, .float64: true
        default: false
        }
    }

    /// Bytes of one element.
    public var size: Int { mlx_dtype_size(cmlxDtype) }
}

/// A value that operations accept in place of an array.
public protocol ScalarOrArray {
    /// The value as an array. A scalar takes `dtype`, the dtype of the other operand, if it fits.
    func asMLXArray(dtype: DType?) -> MLXArray
}

/// A Swift type that can be the element type of an array.
public protocol HasDType: ScalarOrArray {
    static var dtype: DType { get }
}

extension MLXArray: ScalarOrArray {
    public func asMLXArray(dtype: DType?) -> MLXArray { self }
}

extension Bool: HasDType {
    public static var dtype: DType { .bool }
    public func asMLXArray(dtype: DType?) -> MLXArray { MLXArray(self) }
}

extension Int: HasDType {
    /// 64-bit elements in memory; but an `Int` that becomes an array is int32, as in mlx-swift.
    public static var dtype: DType { .int64 }
    public func asMLXArray(dtype: DType?) -> MLXArray { MLXArray(self).asType(dtype ?? .int32) }
}

extension Int32: HasDType {
    public static var dtype: DType { .int32 }
    public func asMLXArray(dtype: DType?) -> MLXArray { MLXArray(self).asType(dtype ?? .int32) }
}

extension UInt8: HasDType {
    public static var dtype: DType { .uint8 }
    public func asMLXArray(dtype: DType?) -> MLXArray {
        MLXArray([self], [Int]()).asType(dtype ?? .uint8)
    }
}

extension UInt16: HasDType {
    public static var dtype: DType { .uint16 }
    public func asMLXArray(dtype: DType?) -> MLXArray {
        MLXArray([self], [Int]()).asType(dtype ?? .uint16)
    }
}

extension UInt32: HasDType {
    public static var dtype: DType { .uint32 }
    public func asMLXArray(dtype: DType?) -> MLXArray {
        MLXArray([self], [Int]()).asType(dtype ?? .uint32)
    }
}

extension Float: HasDType {
    public static var dtype: DType { .float32 }
    public func asMLXArray(dtype: DType?) -> MLXArray {
        MLXArray(self).asType(dtype.flatMap { $0.isFloatingPoint ? $0 : nil } ?? .float32)
    }
}

/// Two operands as arrays; a scalar takes the dtype of the array beside it.
public func toArrays(_ a: some ScalarOrArray, _ b: some ScalarOrArray) -> (MLXArray, MLXArray) {
    let left = (a as? MLXArray) ?? a.asMLXArray(dtype: (b as? MLXArray)?.dtype)
    let right = (b as? MLXArray) ?? b.asMLXArray(dtype: (a as? MLXArray)?.dtype)
    return (left, right)
}
