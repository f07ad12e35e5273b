import MLX

/// The sinks and the newest rows stay (Xiao et al. 2024, StreamingLLM), regardless of the split of
/// heavy and recent rows.
public struct WindowPolicy: EvictionPolicy {
    /// It has no settings.
    public init() {}

    /// By age, not position: float32 holds every age in a cache, but not every position of a
    /// sequence beyond 2^24 tokens.
    public func rank(_ rows: PolicyRows) -> MLXArray {
        (rows.positions - rows.offset).asType(.float32)
    }
}
