import Cmlx

extension [Int] {
    /// Sizes and axes as the C functions take them.
    var int32: [Int32] { map { Int32($0) } }
}

extension MLXArray {
    public convenience init(_ value: Bool) { self.init(mlx_array_new_bool(value)) }
    public convenience init(_ value: Float) { self.init(mlx_array_new_float(value)) }
    public convenience init(_ value: Int32) { self.init(mlx_array_new_int(value)) }

    /// An int32 array: `value` must fit.
    public convenience init(_ value: Int) { self.init(Int32(value)) }

    /// A copy of `values`, with the given shape, or one axis.
    public convenience init<T: HasDType>(
        _ values: [T], _ shape: (some Collection<Int>)? = [Int]?.none
    ) {
        let sizes = shape.map { Array($0) } ?? [values.count]
        precondition(sizes.reduce(1, *) == values.count, "shape \(sizes) of \(values.count) values")
        self.init(
            values.withUnsafeBytes {
                mlx_array_new_data(
                    $0.baseAddress, sizes.int32, Int32(sizes.count), T.dtype.cmlxDtype)
            })
    }

    /// An int32 array: every value must fit.
    public convenience init(_ values: [Int], _ shape: (some Collection<Int>)? = [Int]?.none) {
        self.init(values.int32, shape)
    }

    public convenience init<S: Sequence>(
        _ sequence: S, _ shape: (some Collection<Int>)? = [Int]?.none
    ) where S.Element: HasDType {
        self.init(Array(sequence), shape)
    }

    public static func zeros(
        _ shape: some Collection<Int>, dtype: DType, stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.zeros(shape, dtype: dtype, stream: stream)
    }

    public static func full(
        _ shape: some Collection<Int>, values: MLXArray, dtype: DType,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        MLX.full(shape, values: values, dtype: dtype, stream: stream)
    }
}

public func zeros(
    _ shape: some Collection<Int>, dtype: DType, stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    mlx_zeros(&result, Array(shape).int32, shape.count, dtype.cmlxDtype, stream.ctx)
    return MLXArray(result)
}

public func full(
    _ shape: some Collection<Int>, values: MLXArray, dtype: DType,
    stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    mlx_full(
        &result, Array(shape).int32, shape.count, values.ctx, dtype.cmlxDtype, stream.ctx)
    return MLXArray(result)
}

/// Random arrays.
public enum MLXRandom {
    public static func key(_ seed: UInt64) -> MLXArray {
        initError()
        var result = mlx_array_new()
        mlx_random_key(&result, seed)
        return MLXArray(result)
    }

    public static func normal(
        _ shape: some Collection<Int> = [], dtype: DType, loc: Float = 0, scale: Float = 1,
        key: MLXArray? = nil, stream: StreamOrDevice = .default
    ) -> MLXArray {
        var result = mlx_array_new()
        mlx_random_normal(
            &result, Array(shape).int32, shape.count, dtype.cmlxDtype, loc, scale,
            (key ?? .mlxNone).ctx, stream.ctx)
        return MLXArray(result)
    }
}
