import MLX

/// The pair of rows whose merger changes attention least becomes one row: ``mergers(keys:values:bias:positions:keep:sinkSize:recentStart:sharedHeads:stream:)``.
///
/// What is remembered of a row is `ln n` of the n rows in it, which attention adds to its logit. So
/// it needs attention of this package, and no scores.
public struct MergePolicy: EvictionPolicy {
    public init() {}

    public var merges: Bool { true }

    public func rank(_ rows: PolicyRows) throws -> MLXArray { try keyDiversity(rows.keys) }
}
