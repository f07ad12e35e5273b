import CMLXH2O
import Cmlx
import MLX

/// One number for all sequences, an `Int`, or one per sequence, int32 [B].
public protocol PerSequence {
    /// int32 [] or [B].
    var perSequence: MLXArray { get }
}

extension Int: PerSequence {
    public var perSequence: MLXArray { MLXArray(Int32(clamping: self)) }
}

extension MLXArray: PerSequence {
    public var perSequence: MLXArray { self }
}

/// Slots of the rows that stay when a cache is reduced to `keep` rows per head.
///
/// Best first: protected rows (0 <= position < `sinkSize`, or position >= `recentStart`); then
/// scores, descending; then rows whose score is NaN; then padding. In a tie the lower position
/// stays, for padding the lower slot.
///
/// - Parameters:
///   - scores: float32 [B, H, N], one per row
///   - positions: int32 [B, H, N], distinct within a head and below 2^30; negative: padding
///   - keep: rows to keep, 1 to N
///   - sinkSize: the number of first positions to protect
///   - recentStart: the first position of the protected recent window, an `Int`, or int32 [B] with
///     one per sequence; nil: no window
///   - stream: stream or device to evaluate on
/// - Returns: uint32 [B, H, keep], ascending
/// - Throws: ``H2OError`` if an argument is not as above
public func keepIndices(
    _ scores: MLXArray, positions: MLXArray, keep: Int, sinkSize: Int = 0,
    recentStart: (any PerSequence)? = nil, stream: StreamOrDevice = .default
) throws -> MLXArray {
    // A number beyond int32 means the same as the nearest int32.
    let start = recentStart?.perSequence ?? .mlxNone
    return try results(1) { place in
        mlx_h2o_keep_indices(
            place, scores.ctx, positions.ctx, Int32(clamping: keep), Int32(clamping: sinkSize),
            start.ctx, stream.ctx)
    }[0]
}
