import CMLXH2O
import Cmlx
import MLX

/// The changed rows when others are folded into them; `r` rows of each head are evicted.
public struct FoldedRows {
    /// uint32 [B, H, r]: the slots of the changed rows. A slot appears once for each row folded
    /// into it, each time with the same row; a row that is not folded has its own slot.
    public let into: MLXArray
    /// [B, H, r, D]: the new keys there, in the dtype of the keys.
    public let keys: MLXArray
    /// [B, H, r, Dv].
    public let values: MLXArray
    /// float32 [B, H, r]: `ln n` of the n rows that each row stands for.
    public let bias: MLXArray
    /// float32 [B, H, r]: the summed masses.
    public let mass: MLXArray
}

/// Fold each evicted row into the nearest eligible row that stays.
///
/// Keys and values become weighted means; counts, whose logarithm is `bias`, and masses add up.
/// Rows folded into the same row enter its mean together. docs/design.md defines the distance.
///
/// - Parameters:
///   - keys: [B, H, N, D], float32, float16 or bfloat16
///   - values: [B, H, N, Dv] of the same dtype
///   - bias: `ln n` of the n rows that each row stands for, float32 [B, H, N]: 0 for an original
///     row. Attention takes it as `rowBias`
///   - mass: a number per row that adds up in folding, float32 [B, H, N]
///   - weights: of the rows in means, float32 [B, H, N]; at least 1e-9 counts. An evicted row with
///     NaN is not folded
///   - eligible: bool [B, H, N], the rows that others may be folded into, if they stay
///   - kept: uint32 [B, H, K], 0 < K < N: the slots that stay, ascending
///   - share: the share of a head's evicted rows that is folded, rounded up: the nearest. Above 0,
///     at most 1
///   - stream: stream or device to evaluate on
/// - Throws: ``H2OError`` if an argument is not as above
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
