import MLX
import MLXH2O

/// keydiff's ranks in the pass of attention: the mean key as one more query of each KV head.
///
/// The rows after an append are the rows before the next eviction. So the ranks that the next step
/// needs are logits of keys that this step's attention reads anyway, and only the sum of the
/// normalised keys and their norms must be known, which change by one row at a time.
struct KeyRanks {
    /// Bytes of a layer's dense keys below which a CPU reads them again, in less time than it takes
    /// to hand out the operations on their sums.
    static let secondReadBytes = 1 << 21

    /// Replacements after which the statistics are made anew, so that rounding does not add up.
    private static let afresh = 1024

    /// Of the stored keys.
    let statistics: KeyStatistics
    /// Rows per head since the statistics were made from all keys.
    let replaced: Int
    /// Whether the importance of the rows is their rank: from attention to the next replacement.
    var areCurrent = false

    init(statistics: KeyStatistics, replaced: Int = 0) {
        self.statistics = statistics
        self.replaced = replaced
    }

    /// Whether the next replacement shall keep the statistics up to date.
    var canBeFollowed: Bool { areCurrent && replaced < Self.afresh }
}

extension KeyStatistics {
    var arrays: [MLXArray] { [keySum, inverseNorms] }
}

extension RowStore {
    /// Whether the importance of the rows is their rank.
    var areRanked: Bool { keyRanks?.areCurrent == true }

    /// Whether ranks in the pass of attention can be had, for less than a second read of the keys.
    ///
    /// On a GPU always for less: the second read is a composition of many operations. So it is of
    /// packed keys on a CPU, which would be unpacked.
    func canRankKeys(for queries: MLXArray, scale: Float, secondReadBytes: Int) -> Bool {
        let (keys, values) = layouts
        guard scale != 0, queries.dtype == keys.dtype, queries.dtype == values.dtype else {
            return false
        }
        let used = positions.size * keys.size * keys.dtype.size
        return packing != nil || Device.defaultDevice().deviceType == .gpu
            || used >= secondReadBytes
    }

    /// Attention of at most 8 queries; the importance becomes the ranks of the keys.
    mutating func attendAndRank<Rows: CacheRows>(
        _ kind: Rows.Type, _ queries: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode
    ) throws -> MLXArray {
        let (keyParts, valueParts) = fetch()
        let (keys, values) = (Rows.rows(of: keyParts), Rows.rows(of: valueParts))
        let (bits, groupSize) = (packing?.bits ?? 8, packing?.groupSize ?? 64)
        let known =
            try keyRanks
            ?? KeyRanks(statistics: keyStatistics(keys, bits: bits, groupSize: groupSize))
        let (found, logits) = try MLXFast.scaledDotProductAttentionWithProbes(
            queries: queries, keys: keys, values: values,
            probes: probes(known.statistics.keySum, dtype: queries.dtype), scale: scale, bits: bits,
            groupSize: groupSize, valueBits: packing?.valueBits, mask: mask)
        importance = logits.sum(axis: 2) * (known.statistics.inverseNorms * (-1 / scale))
        keyRanks = known
        keyRanks?.areCurrent = true
        return found.output
    }
}

/// The mean direction [B, H, E, D] of the keys; of half precision two parts, whose logits add up.
private func probes(_ keySum: MLXArray, dtype: DType) -> MLXArray {
    let length = sqrt(square(keySum).sum(axis: -1, keepDims: true))
    // A sum of zeros has the direction 0, not NaN.
    let mean = (keySum / maximum(length, Float(1e-12))).expandedDimensions(axis: 2)
    guard dtype != .float32 else { return mean }
    let upper = mean.asType(dtype)
    let lower = (mean - upper.asType(.float32)).asType(dtype)
    return concatenated([upper, lower], axis: 2)
}
