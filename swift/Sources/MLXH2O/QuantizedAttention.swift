import CMLXH2O
import Cmlx
import MLX

extension MLXFast {
    /// Attention with its scores over packed keys and values, which are dequantised in registers:
    /// ``PackedRows``, or ``CodedRows``, beside which keys may also be dense.
    ///
    /// It gives what
    /// ``scaledDotProductAttentionWithScores(queries:keys:values:scale:mask:sinks:rowBias:stream:)`` gives
    /// for the dequantised rows.
    ///
    /// - Parameters:
    ///   - queries: [B, Hq, Lq, D], float32, float16 or bfloat16
    ///   - keys: of rows [B, Hkv, N, D]
    ///   - values: of rows [B, Hkv, N, Dv], with scales of the dtype of the keys' scales
    ///   - scale: finite factor of the products
    ///   - bits: of the keys: 2, 3, 4, 5, 6 or 8; of codes 2, 3 or 4
    ///   - groupSize: 32, 64 or 128; D and Dv are multiples of it
    ///   - valueBits: of the values; nil: `bits`
    ///   - mask: as for dense rows
    ///   - sinks: learned logits [Hq]
    ///   - rowBias: float32 [B, Hkv, N], as for dense rows
    ///   - sparseVThreshold: a pair whose weight is below it adds nothing to the output, and its
    ///     value need not be read (Turney 2026). 0 is off; 1e-6 is a good value; below 1
    ///   - stream: stream or device to evaluate on
    /// - Returns: output and scores
    /// - Throws: ``H2OError`` where an argument is not as above, or the named back end cannot serve
    ///   the call
    public static func scaledDotProductAttentionQuantizedWithScores<
        Keys: CacheRows, Values: CacheRows
    >(
        queries: MLXArray, keys: Keys, values: Values, scale: Float, bits: Int = 8,
        groupSize: Int = 64, valueBits: Int? = nil,
        mask: ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil,
        rowBias: MLXArray? = nil, sparseVThreshold: Float = 0, stream: StreamOrDevice = .default
    ) throws -> (output: MLXArray, scores: MLXArray) {
        let found = try quantized(
            queries, keys.parts, values.parts, scale, bits, groupSize, valueBits, mask, sinks,
            rowBias, sparseVThreshold, stream, returnsAll: false)
        return (found[0], found[1])
    }

    /// The same with the logarithm of the denominator, and `skipped`, float32 [B, Hq, Lq]: the share
    /// of the N rows that added nothing because their weight was below the threshold.
    public static func scaledDotProductAttentionQuantizedWithScoresAndLse<
        Keys: CacheRows, Values: CacheRows
    >(
        queries: MLXArray, keys: Keys, values: Values, scale: Float, bits: Int = 8,
        groupSize: Int = 64, valueBits: Int? = nil,
        mask: ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil,
        rowBias: MLXArray? = nil, sparseVThreshold: Float = 0, stream: StreamOrDevice = .default
    ) throws -> (attention: AttentionWithScores, skipped: MLXArray) {
        let found = try quantized(
            queries, keys.parts, values.parts, scale, bits, groupSize, valueBits, mask, sinks,
            rowBias, sparseVThreshold, stream, returnsAll: true)
        return (
            AttentionWithScores(output: found[0], scores: found[1], lse: found[2]),
            skipped: found[3]
        )
    }

    private static func quantized(
        _ queries: MLXArray, _ keys: [MLXArray], _ values: [MLXArray], _ scale: Float, _ bits: Int,
        _ groupSize: Int, _ valueBits: Int?, _ mask: ScaledDotProductAttentionMaskMode,
        _ sinks: MLXArray?, _ rowBias: MLXArray?, _ sparseVThreshold: Float,
        _ stream: StreamOrDevice, returnsAll: Bool
    ) throws -> [MLXArray] {
        let (mode, array) = mask.arguments
        // Codes have no biases, dense keys no scales either.
        let none = [MLXArray](repeating: .mlxNone, count: 3)
        let (k, v) = (keys + none, values + none)
        return try results(4) { place in
            mlx_h2o_scaled_dot_product_attention_quantized_with_scores(
                place, place + 1, returnsAll ? place + 2 : nil, returnsAll ? place + 3 : nil,
                queries.ctx, k[0].ctx, k[1].ctx, k[2].ctx, v[0].ctx, v[1].ctx, v[2].ctx, scale,
                Int32(clamping: bits),
                Int32(clamping: groupSize), optional(valueBits), mode, array.ctx,
                (sinks ?? .mlxNone).ctx, (rowBias ?? .mlxNone).ctx, sparseVThreshold, stream.ctx)
        }
    }
}
