import MLX

/// The stored rows of one layer, as a policy sees them; slots are in no particular order.
public struct PolicyRows {
    /// [B, H, N, D], the model's dtype, with RoPE applied. Quantised ones are dequantised here.
    public var keys: MLXArray { get throws { try makeKeys() } }
    /// [B, H, N, Dv]; as the keys.
    public var values: MLXArray { get throws { try makeValues() } }
    /// float32 [B, H, N], what `accumulate` made; NaN where not yet scored.
    public let importance: MLXArray
    /// int32 [B, H, N], the place of each row in the sequence.
    public let positions: MLXArray
    /// Tokens that the cache has seen, which is the position of the next row.
    public let offset: Int
    /// Rows of each head that stay.
    public let keep: Int
    /// Of these, those that no range protects: what ranks decide about.
    public let places: Int
    /// The first positions, whose rows stay.
    public let sinkSize: Int
    /// The first position of the newest rows, which stay too.
    public let recentStart: Int

    private let makeKeys: () throws -> MLXArray
    private let makeValues: () throws -> MLXArray

    /// Keys and values are evaluated when a policy reads them.
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

/// Ranks stored rows; a cache evicts the lowest ranked that no window protects.
///
/// A policy holds settings, no state: what is remembered of a row lives in the cache beside the
/// row, so that it is evicted, copied and saved with it.
public protocol EvictionPolicy: Sendable {
    /// Whether attention must hand its scores to the cache after every update.
    var needsScores: Bool { get }

    /// Whether rows that go are folded into others, weighed by their ranks. Attention then adds
    /// `ln n` to the logit of a row that stands for n.
    var folds: Bool { get }

    /// Of the rows that go together, the share that is folded: the nearest.
    var foldShare: Double { get }

    /// bool [B, H, N]: whether others may be folded into a row of this rank.
    func takes(_ ranks: MLXArray) -> MLXArray

    /// Whether `accumulate` gets weights, `exp(scores - lse)`, in the place of scores.
    var needsWeights: Bool { get }

    /// Queries of a chunk that `accumulate` sees, counted from its end, at most
    /// ``maxScoredQueries``. Nil: all; of a long chunk their weights come summed, as one query with
    /// one head per KV head.
    var chunkQueries: Int? { get }

    /// Take in what one attention says of the rows.
    ///
    /// - Parameters:
    ///   - importance: float32 [B, H, N], NaN where a row has not been scored
    ///   - scores: float32 [B, Hq, L, N], logits before the softmax, queries in order, -inf where
    ///     masked; Hq is a multiple of H. With `needsWeights` the weights that the softmax makes
    ///     of them, 0 where masked
    ///   - positions: int32 [B, H, N], as in ``PolicyRows``
    ///   - isMasked: false promises that no score is -inf
    /// - Returns: the new importance, float32 [B, H, N]
    func accumulate(
        _ importance: MLXArray, scores: MLXArray, positions: MLXArray, isMasked: Bool
    ) throws -> MLXArray

    /// float32 [B, H, N], higher is kept; NaN goes first. Called only when rows must go.
    func rank(_ rows: PolicyRows) throws -> MLXArray

    /// Where `accumulate` is what attention does of this kind, it may do it itself, without storing
    /// scores; nil: it may not.
    var kind: ChunkScores? { get }

    /// That of the kind `.ema`.
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
