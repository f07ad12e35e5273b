import CMLXH2O
import Cmlx
import MLX

/// Queries of a chunk that are scored, counted from its end; at a = 0.95 older ones weigh 0.14 %.
public let maxScoredQueries = 128

/// The moving average `C = a*C + (1-a)*|s|` of every row, over the queries in order.
///
/// `s` is the mean of a row's scores over the unmasked query heads of its KV head. A pair that is
/// masked for every head of the group leaves C unchanged, and the first unmasked score of a row
/// sets `C = |s|` (AtomGradient 2026, section 3.2, whose C starts at 0).
///
/// - Parameters:
///   - importance: C, float32 [B, H, N], NaN where a row has not been scored
///   - scores: float32 [B, Hq, Lq, N], -inf or NaN where masked; Hq a multiple of H, Lq at most
///     ``maxScoredQueries``
///   - decay: a, at least 0 and below 1
///   - isMasked: false promises that every score is finite
///   - stream: stream or device to evaluate on
/// - Returns: float32 [B, H, N]. With one query the same bits on all CPU back ends
/// - Throws: ``H2OError`` if an argument is not as above
public func accumulateScores(
    _ importance: MLXArray, scores: MLXArray, decay: Double, isMasked: Bool = true,
    stream: StreamOrDevice = .default
) throws -> MLXArray {
    try results(1) { place in
        mlx_h2o_accumulate_scores(place, importance.ctx, scores.ctx, decay, isMasked, stream.ctx)
    }[0]
}

/// How a chunk's queries score each key.
public enum ChunkScores: String, Sendable, CaseIterable {
    /// The moving average over the last queries.
    case ema
    /// The attention mass of all queries (Zhang et al. 2023, H2O).
    case mass
}

/// The scores of a chunk of queries, summed up per key and KV head, without a matrix of all queries
/// by all keys.
///
/// - Parameters:
///   - queries: [B, Hq, Lq, D], float32, float16 or bfloat16
///   - keys: [B, Hkv, N, D], the dtype of the queries
///   - scale: finite factor of the products
///   - mask: for all Lq queries
///   - sinks: learned logits [Hq], for `.mass`
///   - rowBias: float32 [B, Hkv, N], as in attention
///   - kind: `.ema`: the same as ``accumulateScores(_:scores:decay:isMasked:stream:)`` over the
///     last `countedQueries` queries; NaN for rows still unscored. `.mass`: the sum of the weights
///     over all queries, and over the query heads of the KV head
///   - importance: for `.ema`, the average so far, float32 [B, Hkv, N]; nil: no row has been scored
///   - decay: for `.ema`
///   - countedQueries: for `.ema`, at least 1
///   - stream: stream or device to evaluate on
/// - Returns: float32 [B, Hkv, N]
/// - Throws: ``H2OError`` if an argument is not as above
public func prefillScores(
    queries: MLXArray, keys: MLXArray, scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode = .none, sinks: MLXArray? = nil,
    rowBias: MLXArray? = nil, kind: ChunkScores = .ema, importance: MLXArray? = nil,
    decay: Double = 0.95, countedQueries: Int = maxScoredQueries, stream: StreamOrDevice = .default
) throws -> MLXArray {
    let (mode, array) = mask.arguments
    return try results(1) { place in
        mlx_h2o_prefill_scores(
            place, queries.ctx, keys.ctx, scale, mode, array.ctx, (sinks ?? .mlxNone).ctx,
            (rowBias ?? .mlxNone).ctx, kind.rawValue, (importance ?? .mlxNone).ctx, decay,
            Int32(clamping: countedQueries), stream.ctx)
    }[0]
}
