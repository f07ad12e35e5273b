import CMLXH2O
import Cmlx
import MLX

/// What becomes of rows that merge; `r` of each head go.
public struct MergedRows {
    /// uint32 [B, H, keep]: the slots that stay, ascending.
    public let kept: MLXArray
    /// uint32 [B, H, r]: the slots of the rows that change. One is there as often as rows go there,
    /// each time with the same row.
    public let into: MLXArray
    /// [B, H, r, D]: the keys there from now on, in the dtype given.
    public let keys: MLXArray
    /// [B, H, r, Dv].
    public let values: MLXArray
    /// float32 [B, H, r]: `ln n` of the n rows that each stands for.
    public let bias: MLXArray
    /// int32 [B, H, r]: the earliest position of the rows in each.
    public let positions: MLXArray
}

/// What becomes of rows when all but `keep` of each head merge into others.
///
/// Of the rows that no zone protects, those whose merger with a row in a later slot costs attention
/// least go, each into that row; where it goes too, into the one that it goes to. A row without a
/// partner goes as it is. Keys and values become means weighted by `n * exp(-3 c)`, `c` being the
/// cosine of a key with the mean of the normalised ones, in which a row of n counts `sqrt(n)` times.
/// docs/policies.md has the definition. O(N^2 (D + Dv)).
///
/// - Parameters:
///   - keys: [B, H, N, D], float32, float16 or bfloat16
///   - values: [B, H, N, Dv] of the same dtype
///   - bias: `ln n` of the n rows that each stands for, float32 [B, H, N]: 0 for a row as it came.
///     Attention takes it as `rowBias`. NaN: the row goes first, as it is, and none goes there
///   - positions: int32 [B, H, N], as in ``keepIndices(_:positions:keep:sinkSize:recentStart:stream:)``
///   - keep: rows that stay, 1 to N - 1
///   - sinkSize: the first positions, which stay as they are
///   - recentStart: the first position of the recent window, which does too, an `Int`, or int32 [B];
///     nil: no window
///   - sharedHeads: whether all heads merge the same slots, by the mean of their costs. They must
///     hold the same positions in the same slots
///   - stream: stream or device to evaluate on
/// - Throws: ``H2OError`` where an argument is not as above
public func mergers(
    keys: MLXArray, values: MLXArray, bias: MLXArray, positions: MLXArray, keep: Int,
    sinkSize: Int = 0, recentStart: (any PerSequence)? = nil, sharedHeads: Bool = false,
    stream: StreamOrDevice = .default
) throws -> MergedRows {
    let start = recentStart?.perSequence ?? .mlxNone
    let found = try results(6) { place in
        mlx_h2o_mergers(
            place, place + 1, place + 2, place + 3, place + 4, place + 5, keys.ctx, values.ctx,
            bias.ctx, positions.ctx, Int32(clamping: keep), Int32(clamping: sinkSize), start.ctx,
            sharedHeads, stream.ctx)
    }
    return MergedRows(
        kept: found[0], into: found[1], keys: found[2], values: found[3], bias: found[4],
        positions: found[5])
}
