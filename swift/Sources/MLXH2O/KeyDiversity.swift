import CMLXH2O
import MLX

/// Minus the cosine of each key with the mean of the normalised keys of its head.
///
/// - Parameters:
///   - keys: [B, H, N, D], float32, float16 or bfloat16
///   - stream: stream or device to evaluate on
/// - Returns: float32 [B, H, N]; a key of zeros gets 0
/// - Throws: ``H2OError`` if the keys are not as above
public func keyDiversity(_ keys: MLXArray, stream: StreamOrDevice = .default) throws -> MLXArray {
    try results(1) { place in mlx_h2o_key_diversity(place, keys.ctx, stream.ctx) }[0]
}
