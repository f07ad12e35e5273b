import CMLXH2O
import Cmlx
import MLX

/// The rows that change when others are folded into them; `r` of each head go.
public struct FoldedRows {
    /// uint32 [B, H, r]: the slots of the rows that change. One is there as often as rows are folded
    /// into it, each time with the same row; a row that is folded into none has its own slot.
    public let into: MLXArray
    /// [B, H, r, D]: the keys there from now on, in the dtype given.
    public let keys: MLXArray
    /// [B, H, r, Dv].
    public let values: MLXArray
    /// float32 [B, H, r]: `ln n` of the n rows that each stands for.
    public let bias: MLXArray
    /// float32 [B, H, r]: the summed masses.
    public let mass: MLXArray
}

/// Fold each row that goes into the nearest row that stays and is eligible.
///
/// Keys and values become means by weight; counts, of which `bias` is the logarithm, and masses add
/// up. Rows that are folded into the same one enter its mean together. docs/design.md has the
/// distance.
///
/// - Parameters:
///   - keys: [B, H, N, D], float32, float16 or bfloat16
///   - values: [B, H, N, Dv] of the same dtype
///   - bias: `ln n` of the n rows that each stands for, float32 [B, H, N]: 0 for a row as it came.
///     Attention takes it as `rowBias`
///   - mass: what adds up with the rows, float32 [B, H, N]
///   - weights: of the rows in means, float32 [B, H, N]; at least 1e-9 counts. A row that goes with
///     NaN is not folded
///   - eligible: bool [B, H, N], the rows that others may be folded into, if they stay
///   - kept: uint32 [B, H, K], 0 < K < N: the slots that stay, ascending
///   - share: of the rows of a head that go, rounded up, those that are folded: the nearest. Above 0,
///     at most 1
///   - stream: stream or device to evaluate on
/// - Throws: ``H2OError`` where an argument is not as above
public func fold(
    keys: MLXArray, values: MLXArray, bias: MLXArray, mass: MLXArray, weights: MLXArray,
    eligible: MLXArray, kept: MLXArray, share: Double = 1, stream: StreamOrDevice = .default
) throws -> FoldedRows {
    let found = try results(5) { place in
        mlx_h2o_fold(
            place, place + 1, place + 2, place + 3, place + 4, keys.ctx, values.ctx, bias.ctx,
            mass.ctx, weights.ctx, eligible.ctx, kept.ctx, share, stream.ctx)
    }
    return FoldedRows(
        into: found[0], keys: found[1], values: found[2], bias: found[3], mass: found[4])
}
