import Cmlx

/// How rows are packed.
public enum QuantizationMode: String, Sendable {
    case affine
}

/// The last axis in groups, each with a scale and a bias: words, scales and biases.
public func quantized(
    _ w: MLXArray, groupSize: Int = 64, bits: Int = 4, mode: QuantizationMode = .affine,
    stream: StreamOrDevice = .default
) -> (wq: MLXArray, scales: MLXArray, biases: MLXArray?) {
    var result = mlx_vector_array_new()
    defer { mlx_vector_array_free(result) }
    mlx_quantize(
        &result, w.ctx, some(groupSize), some(bits), mode.rawValue, mlx_array(), stream.ctx)
    let parts = (0..<3).map { index in
        var array = mlx_array_new()
        mlx_vector_array_get(&array, result, index)
        return MLXArray(array)
    }
    return (parts[0], parts[1], parts[2])
}

/// Unpacks the result of ``quantized(_:groupSize:bits:mode:stream:)``, in the dtype of the scales.
public func dequantized(
    _ w: MLXArray, scales: MLXArray, biases: MLXArray?, groupSize: Int = 64, bits: Int = 4,
    mode: QuantizationMode = .affine, stream: StreamOrDevice = .default
) -> MLXArray {
    var result = mlx_array_new()
    mlx_dequantize(
        &result, w.ctx, scales.ctx, (biases ?? .mlxNone).ctx, some(groupSize), some(bits),
        mode.rawValue, mlx_array(), mlx_optional_dtype(value: MLX_FLOAT32, has_value: false),
        stream.ctx)
    return MLXArray(result)
}

private func some(_ number: Int) -> mlx_optional_int {
    mlx_optional_int(value: Int32(number), has_value: true)
}
