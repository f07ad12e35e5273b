import Cmlx

typealias Unary = (UnsafeMutablePointer<mlx_array>, mlx_array, mlx_stream) -> Int32
typealias Reduction = (UnsafeMutablePointer<mlx_array>, mlx_array, Int32, Bool, mlx_stream) -> Int32

func unary(_ operation: Unary, _ array: MLXArray, _ stream: StreamOrDevice = .default) -> MLXArray {
    var result = mlx_array_new()
    _ = operation(&result, array.ctx, stream.ctx)
    return MLXArray(result)
}

func reduce(
    _ operation: Reduction, _ array: MLXArray, axis: Int, keepDims: Bool, _ stream: StreamOrDevice
) -> MLXArray {
    var result = mlx_array_new()
    _ = operation(&result, array.ctx, Int32(axis), keepDims, stream.ctx)
    return MLXArray(result)
}

typealias ReductionOverAxes = (
    UnsafeMutablePointer<mlx_array>, mlx_array, UnsafePointer<Int32>?, Int, Bool, mlx_stream
) -> Int32

func reduce(
    _ operation: ReductionOverAxes, _ array: MLXArray, axes: [Int], keepDims: Bool,
    _ stream: StreamOrDevice
) -> MLXArray {
    var result = mlx_array_new()
    _ = operation(&result, array.ctx, axes.int32, axes.count, keepDims, stream.ctx)
    return MLXArray(result)
}

/// Calls `body` with the arrays as C takes them.
func withVector<R>(_ arrays: some Collection<MLXArray>, _ body: (mlx_vector_array) -> R) -> R {
    let vector = arrays.map(\.ctx).withUnsafeBufferPointer {
        mlx_vector_array_new_data($0.baseAddress, $0.count)
    }
    defer { mlx_vector_array_free(vector) }
    return withExtendedLifetime(arrays) { body(vector) }
}

public func hadamardTransform(
    _ array: MLXArray, scale: Float? = nil, stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    let factor = mlx_optional_float(value: scale ?? 0, has_value: scale != nil)
    mlx_hadamard_transform(&result, array.ctx, factor, stream.ctx)
    return MLXArray(result)
}

public func abs(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_abs, array, stream)
}

public func sqrt(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_sqrt, array, stream)
}

public func square(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_square, array, stream)
}

public func isNaN(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_isnan, array, stream)
}

public func sigmoid(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_sigmoid, array, stream)
}

public func logicalNot(_ array: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    unary(mlx_logical_not, array, stream)
}

public func maximum(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray {
    binary(mlx_maximum, a, b, stream)
}

public func pow(
    _ a: some ScalarOrArray, _ b: some ScalarOrArray, stream: StreamOrDevice = .default
) -> MLXArray {
    binary(mlx_power, a, b, stream)
}

public func matmul(_ a: MLXArray, _ b: MLXArray, stream: StreamOrDevice = .default) -> MLXArray {
    binary(mlx_matmul, a, b, stream)
}

/// `a` where the condition is true, `b` elsewhere.
public func which(
    _ condition: MLXArray, _ a: some ScalarOrArray, _ b: some ScalarOrArray,
    stream: StreamOrDevice = .default
) -> MLXArray {
    let (a, b) = toArrays(a, b)
    var result = mlx_array_new()
    mlx_where(&result, condition.ctx, a.ctx, b.ctx, stream.ctx)
    return MLXArray(result)
}

public func concatenated(
    _ arrays: some Collection<MLXArray>, axis: Int = 0, stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    withVector(arrays) { _ = mlx_concatenate_axis(&result, $0, Int32(axis), stream.ctx) }
    return MLXArray(result)
}

public func stacked(
    _ arrays: some Collection<MLXArray>, axis: Int = 0, stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    withVector(arrays) { _ = mlx_stack_axis(&result, $0, Int32(axis), stream.ctx) }
    return MLXArray(result)
}

public func broadcast(
    _ array: MLXArray, to shape: some Collection<Int>, stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    mlx_broadcast_to(&result, array.ctx, Array(shape).int32, shape.count, stream.ctx)
    return MLXArray(result)
}

public func expandedDimensions(
    _ array: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    mlx_expand_dims(&result, array.ctx, Int32(axis), stream.ctx)
    return MLXArray(result)
}

/// A row-major copy, or the array itself if it is row-major already.
public func contiguous(
    _ a: MLXArray, allowColMajor: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    mlx_contiguous(&result, a.ctx, allowColMajor, stream.ctx)
    return MLXArray(result)
}

public func sorted(
    _ array: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    mlx_sort_axis(&result, array.ctx, Int32(axis), stream.ctx)
    return MLXArray(result)
}

public func logSumExp(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray {
    reduce(mlx_logsumexp_axis, array, axis: axis, keepDims: keepDims, stream)
}

public func argMax(
    _ array: MLXArray, axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
) -> MLXArray {
    reduce(mlx_argmax_axis, array, axis: axis, keepDims: keepDims, stream)
}

public func argSort(
    _ array: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    mlx_argsort_axis(&result, array.ctx, Int32(axis), stream.ctx)
    return MLXArray(result)
}

/// The slices of `array` at `indices` of `axis`.
public func take(
    _ array: MLXArray, _ indices: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    mlx_take_axis(&result, array.ctx, indices.ctx, Int32(axis), stream.ctx)
    return MLXArray(result)
}

/// The values at `indices` along `axis`; the other axes broadcast.
public func takeAlong(
    _ array: MLXArray, _ indices: MLXArray, axis: Int, stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    mlx_take_along_axis(&result, array.ctx, indices.ctx, Int32(axis), stream.ctx)
    return MLXArray(result)
}

/// `array` with `values` written at `indices` along `axis`; the other axes broadcast.
public func putAlong(
    _ array: MLXArray, _ indices: MLXArray, values: MLXArray, axis: Int,
    stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    mlx_put_along_axis(&result, array.ctx, indices.ctx, values.ctx, Int32(axis), stream.ctx)
    return MLXArray(result)
}

/// `inputs`, such that evaluating one of them evaluates `dependencies` too.
public func depends(inputs: [MLXArray], dependencies: [MLXArray]) -> [MLXArray] {
    var result = mlx_vector_array_new()
    defer { mlx_vector_array_free(result) }
    withVector(inputs) { inputs in
        withVector(dependencies) { _ = mlx_depends(&result, inputs, $0) }
    }
    return (0..<mlx_vector_array_size(result)).map {
        var array = mlx_array_new()
        mlx_vector_array_get(&array, result, $0)
        return MLXArray(array)
    }
}

/// `input`, such that evaluating it evaluates `dependencies` too.
public func depends(input: MLXArray, dependencies: [MLXArray]) -> MLXArray {
    depends(inputs: [input], dependencies: dependencies).first ?? .mlxNone
}

extension MLXArray {
    public func exp(stream: StreamOrDevice = .default) -> MLXArray {
        unary(mlx_exp, self, stream)
    }

    public func sum(
        axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray {
        reduce(mlx_sum_axes, self, axes: Array(axes), keepDims: keepDims, stream)
    }

    public func sum(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray {
        reduce(mlx_sum_axis, self, axis: axis, keepDims: keepDims, stream)
    }

    public func mean(
        axes: some Collection<Int>, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray {
        reduce(mlx_mean_axes, self, axes: Array(axes), keepDims: keepDims, stream)
    }

    public func mean(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray {
        reduce(mlx_mean_axis, self, axis: axis, keepDims: keepDims, stream)
    }

    public func max(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray {
        reduce(mlx_max_axis, self, axis: axis, keepDims: keepDims, stream)
    }

    public func any(
        axis: Int, keepDims: Bool = false, stream: StreamOrDevice = .default
    ) -> MLXArray {
        reduce(mlx_any_axis, self, axis: axis, keepDims: keepDims, stream)
    }

    public func reshaped(
        _ newShape: some Collection<Int>, stream: StreamOrDevice = .default
    ) -> MLXArray {
        var result = mlx_array_new()
        mlx_reshape(&result, ctx, Array(newShape).int32, newShape.count, stream.ctx)
        return MLXArray(result)
    }

    public func reshaped(_ newShape: Int..., stream: StreamOrDevice = .default) -> MLXArray {
        reshaped(newShape, stream: stream)
    }

    public func swappedAxes(
        _ axis1: Int, _ axis2: Int, stream: StreamOrDevice = .default
    ) -> MLXArray {
        var result = mlx_array_new()
        mlx_swapaxes(&result, ctx, Int32(axis1), Int32(axis2), stream.ctx)
        return MLXArray(result)
    }

    /// The axes in the given order.
    public func transposed(
        axes: some Collection<Int>, stream: StreamOrDevice = .default
    ) -> MLXArray {
        var result = mlx_array_new()
        mlx_transpose_axes(&result, ctx, Array(axes).int32, axes.count, stream.ctx)
        return MLXArray(result)
    }

    /// The same; without arguments the axes are reversed.
    public func transposed(_ axes: Int..., stream: StreamOrDevice = .default) -> MLXArray {
        transposed(axes: axes.isEmpty ? (0..<ndim).reversed() : axes, stream: stream)
    }

    public func expandedDimensions(axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
        MLX.expandedDimensions(self, axis: axis, stream: stream)
    }

    public func squeezed(axis: Int, stream: StreamOrDevice = .default) -> MLXArray {
        var result = mlx_array_new()
        mlx_squeeze_axis(&result, ctx, Int32(axis), stream.ctx)
        return MLXArray(result)
    }
}
