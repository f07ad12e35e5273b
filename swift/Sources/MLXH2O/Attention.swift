import CMLXH2O
import Cmlx
import MLX

/// What attention with scores returns.
public struct AttentionWithScores {
    /// [B, Hq, Lq, Dv], in the dtype of the queries.
    public let output: MLXArray
    /// float32 [B, Hq, Lq, N]: `scale * q.k + mask + rowBias`, -inf where masked.
    public let scores: MLXArray
    /// float32 [B, Hq, Lq]: the weights are `exp(scores - lse)`. It includes the sink, and is -inf
    /// where nothing is unmasked and there is no sink.
    public let lse: MLXArray

    public init(output: MLXArray, scores: MLXArray, lse: MLXArray) {
        (self.output, self.scores, self.lse) = (output, scores, lse)
    }
}

extension MLXFast {
    /// Scaled dot product attention and the logits that went into its softmax (AtomGradient 2026,
    /// section 3.1).
    ///
    /// A fully masked query gives zeros. NaN in an additive mask makes the output of that query
    /// NaN, and of no other. The result is lazy: nothing is evaluated here.
    ///
    /// - Parameters:
    ///   - queries: [B, Hq, Lq, D], float32, float16 or bfloat16
    ///   - keys: [B, Hkv, N, D] in the dtype of the queries, N at least 1; Hq is a multiple of Hkv
    ///   - values: [B, Hkv, N, Dv] in the dtype of the queries; Dv may differ from D
    ///   - scale: finite factor of the products, usually 1 / sqrt(D)
    ///   - mask: `.causal` is bottom-right aligned. An array broadcasts to [B, Hq, Lq, N] and is
    ///     bool, true where a query sees a key, or float to be added, where a value at or below
    ///     half of the lowest finite one of its dtype masks the pair
    ///   - sinks: learned logits [Hq], which join the denominator and have no row
    ///   - rowBias: float32 [B, Hkv, N], added to the products of every query of the KV head: a row
    ///     of bias log(n) counts as n rows; -inf masks the row
    ///   - stream: stream or device to evaluate on
    /// - Returns: output and scores
    /// - Throws: ``H2OError`` where an argument is not as above, or the named back end cannot serve
    ///   the call
    public static func scaledDotProductAttentionWithScores(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil,
        rowBias: MLXArray? = nil, stream: StreamOrDevice = .default
    ) throws -> (output: MLXArray, scores: MLXArray) {
        let (output, scores, _) = try call(
            queries, keys, values, scale, mask, sinks, rowBias, stream, returnLse: false)
        return (output, scores)
    }

    /// As ``scaledDotProductAttentionWithScores(queries:keys:values:scale:mask:sinks:rowBias:stream:)``,
    /// with the logarithm of the denominator, by which outputs over parts of the keys can be
    /// merged.
    public static func scaledDotProductAttentionWithScoresAndLse(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil,
        rowBias: MLXArray? = nil, stream: StreamOrDevice = .default
    ) throws -> AttentionWithScores {
        let (output, scores, lse) = try call(
            queries, keys, values, scale, mask, sinks, rowBias, stream, returnLse: true)
        return AttentionWithScores(output: output, scores: scores, lse: lse)
    }

    private static func call(
        _ queries: MLXArray, _ keys: MLXArray, _ values: MLXArray, _ scale: Float,
        _ mask: ScaledDotProductAttentionMaskMode, _ sinks: MLXArray?, _ rowBias: MLXArray?,
        _ stream: StreamOrDevice, returnLse: Bool
    ) throws -> (MLXArray, MLXArray, MLXArray) {
        let (mode, array) = mask.arguments
        let found = try results(3) { place in
            mlx_h2o_scaled_dot_product_attention_with_scores(
                place, place + 1, returnLse ? place + 2 : nil, queries.ctx, keys.ctx, values.ctx,
                scale, mode, array.ctx, (sinks ?? .mlxNone).ctx,
                (rowBias ?? .mlxNone).ctx, stream.ctx)
        }
        return (found[0], found[1], found[2])
    }
}
