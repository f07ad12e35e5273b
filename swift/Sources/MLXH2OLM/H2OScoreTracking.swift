import MLX
import MLXLMCommon

/// A cache that evicts by attention scores, and so must get them after every update.
///
/// ``attentionWithCacheUpdate(queries:keys:values:cache:scale:mask:)`` does it for every cache that
/// conforms.
public protocol H2OScoreTracking: KVCache {
    /// Whether the policy uses scores. If not, attention need not return them.
    var needsScores: Bool { get }

    /// Accumulate the scores of the attention that followed an update.
    ///
    /// Layers that share keys may call it several times for one update; each call counts as more
    /// queries. An argument that does not fit is reported to MLX's error handler: see `withError`.
    ///
    /// - Parameters:
    ///   - scores: float32 [B, Hq, L, N], logits before the softmax, -inf where masked, the queries
    ///     in order, N the rows stored; for a chunk of more than 8, only the last 128 queries
    ///   - isMasked: false promises that no score is -inf, which saves work
    func updateScores(_ scores: MLXArray, isMasked: Bool)

    /// Arrays to evaluate with the attention output; otherwise the graph of every step stays alive
    /// until the next eviction.
    var trackedState: [MLXArray] { get }
}

extension H2OScoreTracking {
    /// The same for scores that may be masked.
    public func updateScores(_ scores: MLXArray) { updateScores(scores, isMasked: true) }
}
