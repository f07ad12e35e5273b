import Cmlx

typealias Binary = (UnsafeMutablePointer<mlx_array>, mlx_array, mlx_array, mlx_stream) -> Int32

func binary(
    _ operation: Binary, _ a: some ScalarOrArray, _ b: some ScalarOrArray,
    _ stream: StreamOrDevice = .default
) -> MLXArray {
    let (a, b) = toArrays(a, b)
    var result = mlx_array_new()
    _ = operation(&result, a.ctx, b.ctx, stream.ctx)
    return MLXArray(result)
}

infix operator .== : ComparisonPrecedence
infix operator .< : ComparisonPrecedence
infix operator .<= : ComparisonPrecedence
infix operator .> : ComparisonPrecedence
infix operator .>= : ComparisonPrecedence
infix operator .&& : LogicalConjunctionPrecedence

extension MLXArray {
    public static func + (a: MLXArray, b: MLXArray) -> MLXArray { binary(mlx_add, a, b) }
    public static func + (a: MLXArray, b: some ScalarOrArray) -> MLXArray { binary(mlx_add, a, b) }
    public static func + (a: some ScalarOrArray, b: MLXArray) -> MLXArray { binary(mlx_add, a, b) }

    public static func - (a: MLXArray, b: MLXArray) -> MLXArray { binary(mlx_subtract, a, b) }
    public static func - (a: MLXArray, b: some ScalarOrArray) -> MLXArray {
        binary(mlx_subtract, a, b)
    }
    public static func - (a: some ScalarOrArray, b: MLXArray) -> MLXArray {
        binary(mlx_subtract, a, b)
    }

    public static func * (a: MLXArray, b: MLXArray) -> MLXArray { binary(mlx_multiply, a, b) }
    public static func * (a: MLXArray, b: some ScalarOrArray) -> MLXArray {
        binary(mlx_multiply, a, b)
    }
    public static func * (a: some ScalarOrArray, b: MLXArray) -> MLXArray {
        binary(mlx_multiply, a, b)
    }

    public static func / (a: MLXArray, b: some ScalarOrArray) -> MLXArray {
        binary(mlx_divide, a, b)
    }

    public static prefix func - (a: MLXArray) -> MLXArray { unary(mlx_negative, a) }
    public static prefix func .! (a: MLXArray) -> MLXArray { logicalNot(a) }

    public static func .== (a: MLXArray, b: some ScalarOrArray) -> MLXArray {
        binary(mlx_equal, a, b)
    }
    public static func .< (a: MLXArray, b: some ScalarOrArray) -> MLXArray {
        binary(mlx_less, a, b)
    }
    public static func .<= (a: MLXArray, b: some ScalarOrArray) -> MLXArray {
        binary(mlx_less_equal, a, b)
    }
    public static func .> (a: MLXArray, b: some ScalarOrArray) -> MLXArray {
        binary(mlx_greater, a, b)
    }
    public static func .>= (a: MLXArray, b: some ScalarOrArray) -> MLXArray {
        binary(mlx_greater_equal, a, b)
    }
    public static func .&& (a: MLXArray, b: MLXArray) -> MLXArray { binary(mlx_logical_and, a, b) }
}
