import MLX

/// Keep the rows whose logits have been large (AtomGradient 2026, section 3.2).
///
/// A moving average of the absolute logit, `C = a*C + (1-a)*|s|`, where `s` is the mean over the
/// query heads of the group. The first score sets `C = |s|`. The paper starts at 0, which would put
/// rows at a disadvantage that leave a short recent window.
public struct H2OEmaPolicy: EvictionPolicy {
    /// `a`, at least 0 and below 1.
    public let decay: Double

    /// `decay` is at least 0 and below 1; not checked here.
    public init(decay: Double) { self.decay = decay }

    public var needsScores: Bool { true }
    public var kind: ChunkScores? { .ema }
    public var averageDecay: Double? { decay }

    public func accumulate(
        _ importance: MLXArray, scores: MLXArray, positions: MLXArray, isMasked: Bool
    ) throws -> MLXArray {
        try accumulateScores(importance, scores: scores, decay: decay, isMasked: isMasked)
    }

    public func rank(_ rows: PolicyRows) throws -> MLXArray { rows.importance }
}
