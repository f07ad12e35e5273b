import Cmlx

/// An array of MLX: a node of a lazy graph, evaluated when its values are read.
///
/// The part of mlx-swift's class of the same name that MLXH2O and its tests use, over mlx-c
/// handles, for platforms that mlx-swift does not support.
public final class MLXArray {
    /// The handle that C calls take.
    public internal(set) var ctx: mlx_array

    /// Takes ownership of `ctx`.
    public init(_ ctx: consuming mlx_array) {
        initError()
        self.ctx = ctx
    }

    deinit { mlx_array_free(ctx) }

    /// No array, for an optional argument.
    public static var mlxNone: MLXArray { MLXArray(mlx_array_new()) }

    /// Become the same array as `other`.
    package func become(_ other: MLXArray) {
        mlx_array_set(&ctx, other.ctx)
    }

    public var ndim: Int { mlx_array_ndim(ctx) }
    /// Number of elements.
    public var size: Int { mlx_array_size(ctx) }
    public var nbytes: Int { mlx_array_nbytes(ctx) }
    public var dtype: DType { DType(mlx_array_dtype(ctx)) }

    public var shape: [Int] {
        let ndim = mlx_array_ndim(ctx)
        guard ndim > 0, let sizes = mlx_array_shape(ctx) else { return [] }
        return (0..<ndim).map { Int(sizes[$0]) }
    }

    /// One size; a negative `dim` counts from the end.
    public func dim(_ dim: Int) -> Int { Int(mlx_array_dim(ctx, Int32(dim))) }

    public func asType(_ type: DType, stream: StreamOrDevice = .default) -> MLXArray {
        guard type != dtype else { return self }
        var result = mlx_array_new()
        mlx_astype(&result, ctx, type.cmlxDtype, stream.ctx)
        return MLXArray(result)
    }

    public func asType(_ type: (some HasDType).Type, stream: StreamOrDevice = .default) -> MLXArray
    {
        asType(type.dtype, stream: stream)
    }

    public func eval() {
        mlx_array_eval(ctx)
    }

    /// The value of an array of one element, converted to `type`; evaluates it.
    public func item<T: HasDType>(_ type: T.Type) -> T {
        precondition(size == 1, "item() on an array of \(size) elements")
        return asArray(type)[0]
    }

    public func item<T: HasDType>() -> T { item(T.self) }

    /// The values in row-major order, converted to `type`; evaluates the array. Empty, after
    /// reporting an error, if it cannot be evaluated.
    public func asArray<T: HasDType>(_ type: T.Type) -> [T] {
        let rows = contiguous(asType(type.dtype))
        guard mlx_array_eval(rows.ctx) == 0, let data = rows.data(of: type.dtype) else { return [] }
        return Array(
            UnsafeBufferPointer(start: data.assumingMemoryBound(to: type), count: rows.size))
    }

    private func data(of type: DType) -> UnsafeRawPointer? {
        switch type {
        case .bool: UnsafeRawPointer(mlx_array_data_bool(ctx))
        case .uint8: UnsafeRawPointer(mlx_array_data_uint8(ctx))
        case .uint16: UnsafeRawPointer(mlx_array_data_uint16(ctx))
        case .uint32: UnsafeRawPointer(mlx_array_data_uint32(ctx))
        case .int32: UnsafeRawPointer(mlx_array_data_int32(ctx))
        case .int64: UnsafeRawPointer(mlx_array_data_int64(ctx))
        default: UnsafeRawPointer(mlx_array_data_float32(ctx))
        }
    }
}

extension MLXArray: CustomStringConvertible {
    public var description: String {
        var text = mlx_string_new()
        defer { mlx_string_free(text) }
        guard mlx_array_tostring(&text, ctx) == 0 else { return "" }
        return String(cString: mlx_string_data(text))
    }
}
