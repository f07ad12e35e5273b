import CMLXH2O
import Cmlx
import MLX

/// The results of attention with scores.
public struct AttentionWithScores {
    /// [B, Hq, Lq, Dv], in the dtype of the queries.
    public let output: MLXArray
    /// float32 [B, Hq, Lq, N]: `scale * q.k + mask + rowBias`, -inf where masked.
    public let scores: MLXArray
    /// float32 [B, Hq, Lq]: the weights are `exp(scores - lse)`. Includes the sink; -inf if
    /// everything is masked and there is no sink.
    public let lse: MLXArray

    /// Wraps the results of your own attention.
    public init(output: MLXArray, scores: MLXArray, lse: MLXArray) {
        (self.output, self.scores, self.lse) = (output, scores, lse)
    }
}

extension MLXFast {
    /// Scaled dot product attention and the logits that went into its softmax (AtomGradient 2026,
    /// section 3.1).
    ///
    /// A fully masked query gives zeros. NaN in an additive mask makes only the output of its query
    /// NaN. The result is lazy: nothing is evaluated here.
    ///
    /// - Parameters:
    ///   - queries: [B, Hq, Lq, D], float32, float16 or bfloat16
    ///   - keys: [B, Hkv, N, D] in the dtype of the queries, N at least 1; Hq is a multiple of Hkv
    ///   - values: [B, Hkv, N, Dv] in the dtype of the queries; Dv may differ from D
    ///   - scale: finite factor of the products, usually 1 / sqrt(D)
    ///   - mask: `.causal` is bottom-right aligned. An array broadcasts to [B, Hq, Lq, N] and is
    ///     bool, true where a query sees a key, or float and added: a value at or below half of the
    ///     lowest finite one of its dtype masks the pair
    ///   - sinks: learned logits [Hq], which join the denominator and have no row
    ///   - rowBias: float32 [B, Hkv, N], added to the products of every query of the KV head: a row
    ///     of bias log(n) counts as n rows; -inf masks the row
    ///   - stream: stream or device to evaluate on
    /// - Returns: output and scores
    /// - Throws: ``H2OError`` if an argument is not as above, or the named back end cannot serve
    ///   the call
    public static func scaledDotProductAttentionWithScores(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil,
        rowBias: MLXArray? = nil, stream: StreamOrDevice = .default
    ) throws -> (output: MLXArray, scores: MLXArray) {
        let found = try attention(
            3, queries, [keys], [values], nil, scale, mask, sinks: sinks, rowBias: rowBias,
            stream: stream)
        return (found[0], found[2])
    }

    /// As ``scaledDotProductAttentionWithScores(queries:keys:values:scale:mask:sinks:rowBias:stream:)``,
    /// with the logarithm of the denominator, which allows merging outputs over parts of the keys.
    public static func scaledDotProductAttentionWithScoresAndLse(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil,
        rowBias: MLXArray? = nil, stream: StreamOrDevice = .default
    ) throws -> AttentionWithScores {
        let found = try attention(
            3, queries, [keys], [values], nil, scale, mask, sinks: sinks, rowBias: rowBias,
            stream: stream)
        return AttentionWithScores(output: found[0], scores: found[2], lse: found[1])
    }
}

extension MLXFast {
    /// Attention with scores over packed keys and values, dequantised in registers: ``PackedRows``,
    /// or ``CodedRows``, whose keys may also be dense.
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
    /// - Throws: ``H2OError`` if an argument is not as above, or the named back end cannot serve
    ///   the call
    public static func scaledDotProductAttentionQuantizedWithScores<
        Keys: CacheRows, Values: CacheRows
    >(
        queries: MLXArray, keys: Keys, values: Values, scale: Float, bits: Int = 8,
        groupSize: Int = 64, valueBits: Int? = nil,
        mask: ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil,
        rowBias: MLXArray? = nil, sparseVThreshold: Float = 0, stream: StreamOrDevice = .default
    ) throws -> (output: MLXArray, scores: MLXArray) {
        let found = try attention(
            3, queries, keys.parts, values.parts, (bits, groupSize, valueBits), scale, mask,
            sinks: sinks, rowBias: rowBias, sparseV: sparseVThreshold, stream: stream)
        return (found[0], found[2])
    }

    /// The same with the logarithm of the denominator, and `skipped`, float32 [B, Hq, Lq]: the
    /// share of the N rows that added nothing because their weight was below the threshold.
    public static func scaledDotProductAttentionQuantizedWithScoresAndLse<
        Keys: CacheRows, Values: CacheRows
    >(
        queries: MLXArray, keys: Keys, values: Values, scale: Float, bits: Int = 8,
        groupSize: Int = 64, valueBits: Int? = nil,
        mask: ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil,
        rowBias: MLXArray? = nil, sparseVThreshold: Float = 0, stream: StreamOrDevice = .default
    ) throws -> (attention: AttentionWithScores, skipped: MLXArray) {
        let found = try attention(
            4, queries, keys.parts, values.parts, (bits, groupSize, valueBits), scale, mask,
            sinks: sinks, rowBias: rowBias, sparseV: sparseVThreshold, stream: stream)
        return (
            AttentionWithScores(output: found[0], scores: found[2], lse: found[1]),
            skipped: found[3]
        )
    }

    /// How rows are packed.
    package typealias Packing = (bits: Int, groupSize: Int, valueBits: Int?)

    /// The first `count` of output, lse and scores, and of packed rows skipped. On a GPU, MLX's own
    /// attention computes the output alone of more than 8 queries over dense rows: a fully masked
    /// query then gives a mean of the values.
    package static func attention(
        _ count: Int, _ queries: MLXArray, _ keys: [MLXArray], _ values: [MLXArray],
        _ packing: Packing?, _ scale: Float, _ mask: ScaledDotProductAttentionMaskMode,
        sinks: MLXArray? = nil, rowBias: MLXArray?, sparseV: Float = 0,
        stream: StreamOrDevice = .default
    ) throws -> [MLXArray] {
        let (mode, array) = mask.arguments
        let (sinks, rowBias) = (sinks ?? .mlxNone, rowBias ?? .mlxNone)
        // Codes have no biases, dense keys no scales either.
        let none = [MLXArray](repeating: .mlxNone, count: 3)
        let (k, v) = (keys + none, values + none)
        return try results(count) { place in
            let (lse, scores) = (count > 1 ? place + 1 : nil, count > 2 ? place + 2 : nil)
            guard let packing else {
                return mlx_h2o_scaled_dot_product_attention_with_scores(
                    place, scores, lse, queries.ctx, k[0].ctx, v[0].ctx, scale, mode, array.ctx,
                    sinks.ctx, rowBias.ctx, stream.ctx)
            }
            return mlx_h2o_scaled_dot_product_attention_quantized_with_scores(
                place, scores, lse, count > 3 ? place + 3 : nil, queries.ctx, k[0].ctx, k[1].ctx,
                k[2].ctx, v[0].ctx, v[1].ctx, v[2].ctx, scale, Int32(clamping: packing.bits),
                Int32(clamping: packing.groupSize), optional(packing.valueBits), mode, array.ctx,
                sinks.ctx, rowBias.ctx, sparseV, stream.ctx)
        }
    }
}

/// What ``attentionAndAccumulate(queries:keys:values:importance:scale:kind:decay:mask:sinks:rowBias:bits:groupSize:valueBits:sparseVThreshold:stream:)``
/// returns. Evaluating the output evaluates everything.
public struct AccumulatedAttention {
    /// [B, Hq, Lq, Dv], in the dtype of the queries.
    public let output: MLXArray
    /// float32 [B, Hkv, N].
    public let importance: MLXArray
}

/// Attention that also accumulates its scores per row; a back end need not store them.
///
/// - Parameters:
///   - queries: [B, Hq, Lq, D]; at most ``maxScoredQueries``
///   - keys: [B, Hkv, N, D], dense, packed or coded
///   - values: [B, Hkv, N, Dv]
///   - importance: float32 [B, Hkv, N], as in ``accumulateScores(_:scores:decay:isMasked:stream:)``
///   - scale: finite factor of the products
///   - kind: `.ema`: the moving average, as there; `.mass`: adds to the importance the weights of
///     all queries and of the query heads of the KV head (Zhang et al. 2023, H2O), where NaN counts
///     as 0
///   - decay: for `.ema`
///   - mask: as for dense rows
///   - sinks: learned logits [Hq]
///   - rowBias: float32 [B, Hkv, N], as for dense rows
///   - bits: for packed keys: 2, 3, 4, 5, 6 or 8; for codes 2, 3 or 4
///   - groupSize: for packed rows: 32, 64 or 128
///   - valueBits: for packed values; nil: `bits`
///   - sparseVThreshold: for packed rows, below 1: weights below it add nothing to the output
///   - stream: stream or device to evaluate on
/// - Throws: ``H2OError`` if an argument is not as above
public func attentionAndAccumulate<Keys: CacheRows, Values: CacheRows>(
    queries: MLXArray, keys: Keys, values: Values, importance: MLXArray, scale: Float,
    kind: ChunkScores = .ema, decay: Double = 0.95,
    mask: MLXFast.ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil,
    rowBias: MLXArray? = nil, bits: Int = 8, groupSize: Int = 64, valueBits: Int? = nil,
    sparseVThreshold: Float = 0, stream: StreamOrDevice = .default
) throws -> AccumulatedAttention {
    let (mode, array) = mask.arguments
    let found = try withVector(keys.parts) { keys in
        try withVector(values.parts) { values in
            try results(2) { place in
                mlx_h2o_attention_and_accumulate(
                    place, place + 1, queries.ctx, keys, values, importance.ctx, scale,
                    kind.rawValue, decay, mode, array.ctx, (sinks ?? .mlxNone).ctx,
                    (rowBias ?? .mlxNone).ctx, Int32(clamping: bits), Int32(clamping: groupSize),
                    optional(valueBits), sparseVThreshold, stream.ctx)
            }
        }
    }
    return AccumulatedAttention(output: found[0], importance: found[1])
}
