import MLX

/// The stored rows of one layer, as a policy sees them; slots are in no particular order.
public struct PolicyRows {
    /// [B, H, N, D], the model's dtype, with RoPE applied. Quantised keys are dequantised.
    public var keys: MLXArray { get throws { try makeKeys() } }
    /// [B, H, N, Dv]; like the keys.
    public var values: MLXArray { get throws { try makeValues() } }
    /// float32 [B, H, N], the result of `accumulate`; NaN for unscored rows.
    public let importance: MLXArray
    /// int32 [B, H, N], the position of each row in the sequence.
    public let positions: MLXArray
    /// Tokens that the cache has seen, which is the position of the next row.
    public let offset: Int
    /// Rows of each head to keep.
    public let keep: Int
    /// Of these, the unprotected ones, which ranks decide about.
    public let places: Int
    /// Rows at positions below this always stay.
    public let sinkSize: Int
    /// The first position of the newest rows, which also stay.
    public let recentStart: Int

    private let makeKeys: () throws -> MLXArray
    private let makeValues: () throws -> MLXArray

    /// Keys and values are only computed when a policy reads them.
    public init(
        keys: @autoclosure @escaping () throws -> MLXArray,
        values: @autoclosure @escaping () throws -> MLXArray,
        importance: MLXArray, positions: MLXArray, offset: Int, keep: Int = 0, places: Int = 0,
        sinkSize: Int = 0, recentStart: Int = 0
    ) {
        (makeKeys, makeValues, self.importance) = (keys, values, importance)
        (self.positions, self.offset, self.keep) = (positions, offset, keep)
        (self.places, self.sinkSize, self.recentStart) = (places, sinkSize, recentStart)
    }
}

/// Ranks stored rows; a cache evicts the lowest ranked rows that no window protects.
///
/// A policy holds settings, no state: the state of a row is kept in the cache with the row, so that
/// it is evicted, copied and saved with it.
public protocol EvictionPolicy: Sendable {
    /// Whether attention must pass its scores to the cache after every update.
    var needsScores: Bool { get }

    /// Whether evicted rows are folded into others, weighted by their ranks. Attention then adds
    /// `ln n` to the logit of a row that stands for n rows.
    var folds: Bool { get }

    /// Of the rows evicted together, the share that is folded: the nearest.
    var foldShare: Double { get }

    /// bool [B, H, N]: whether others may be folded into a row of this rank.
    func takes(_ ranks: MLXArray) -> MLXArray

    /// Whether `accumulate` gets weights, `exp(scores - lse)`, instead of scores.
    var needsWeights: Bool { get }

    /// How many of a chunk's last queries `accumulate` sees, at most ``maxScoredQueries``. Nil:
    /// all; for a long chunk, their weights are already summed, as one query with one head per KV
    /// head.
    var chunkQueries: Int? { get }

    /// Accumulate the scores of one attention.
    ///
    /// - Parameters:
    ///   - importance: float32 [B, H, N], NaN where a row has not been scored
    ///   - scores: float32 [B, Hq, L, N], logits before the softmax, queries in order, -inf where
    ///     masked; Hq is a multiple of H. With `needsWeights` the softmax weights instead, 0 where
    ///     masked
    ///   - positions: int32 [B, H, N], as in ``PolicyRows``
    ///   - isMasked: false promises that no score is -inf
    /// - Returns: the new importance, float32 [B, H, N]
    func accumulate(
        _ importance: MLXArray, scores: MLXArray, positions: MLXArray, isMasked: Bool
    ) throws -> MLXArray

    /// float32 [B, H, N]; higher is kept, NaN is evicted first. Called only for an eviction.
    func rank(_ rows: PolicyRows) throws -> MLXArray

    /// The kind of attention that accumulates as `accumulate` does, so that it may do so itself
    /// without storing scores; nil: none.
    var kind: ChunkScores? { get }

    /// The decay of the kind `.ema`.
    var averageDecay: Double? { get }
}

extension EvictionPolicy {
    public var needsScores: Bool { false }
    public var folds: Bool { false }
    public var foldShare: Double { 1 }
    public func takes(_ ranks: MLXArray) -> MLXArray { .!isNaN(ranks) }
    public var needsWeights: Bool { false }
    public var chunkQueries: Int? { maxScoredQueries }
    public var kind: ChunkScores? { nil }
    public var averageDecay: Double? { nil }

    public func accumulate(
        _ importance: MLXArray, scores: MLXArray, positions: MLXArray, isMasked: Bool
    ) throws -> MLXArray {
        importance
    }
}
