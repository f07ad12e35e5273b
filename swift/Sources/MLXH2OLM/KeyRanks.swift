import MLX
import MLXH2O

/// keydiff's ranks in the pass of attention: the mean key as one more query of each KV head.
///
/// The rows after an append are the rows before the next eviction. So the ranks that the next step
/// needs are logits of keys that this step's attention reads anyway, and only the sum of the
/// normalised keys and their norms must be known, which change by one row at a time.
struct KeyRanks {
    /// Bytes of a layer's dense keys, for each sequence, below which a CPU reads them again for
    /// every row that goes, rather than to keep sums of them; `evictEvery` above 1: where rows go in
    /// groups, the sums cost more there, and the read comes once per group.
    static func secondReadBytes(evictEvery: Int) -> Int { evictEvery == 1 ? 1 << 21 : 1 << 24 }

    /// Rows per head that go until the statistics are made anew, so that rounding does not add up.
    static let afresh = 1024

    /// Of the first rows; those behind have been appended since.
    let statistics: KeyStatistics
    /// Rows per head that went since the statistics were made from all keys.
    let replaced: Int
    /// Whether the importance of the rows is their rank: from attention to the next change of rows.
    var areCurrent = false

    init(statistics: KeyStatistics, replaced: Int = 0) {
        self.statistics = statistics
        self.replaced = replaced
    }

    /// The keys that were appended taken in: reads those alone.
    func withAppended(to store: RowStore) throws -> KeyRanks {
        let start = statistics.inverseNorms.dim(2)
        guard start < store.length else { return self }
        let new = try store.statistics(ofKeys: store.fetch().keys.map { $0[0..., 0..., start...] })
        return KeyRanks(
            statistics: KeyStatistics(
                keySum: statistics.keySum + new.keySum,
                inverseNorms: concatenated([statistics.inverseNorms, new.inverseNorms], axis: 2)),
            replaced: replaced)
    }

    /// Without the rows at `gone` [B, H, n], the others in the order of `slots`. Nil where the ranks
    /// are not those of all rows.
    func without(
        _ gone: MLXArray, keeping slots: MLXArray, of store: RowStore
    ) throws -> KeyRanks? {
        guard areCurrent else { return nil }
        let lost = try store.statistics(ofKeys: store.keys.map { gathered($0, gone) })
        return KeyRanks(
            statistics: KeyStatistics(
                keySum: statistics.keySum - lost.keySum,
                inverseNorms: takeAlong(statistics.inverseNorms, slots, axis: 2)),
            replaced: replaced + gone.dim(2))
    }
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
    /// packed keys on a CPU, which would be unpacked; of dense ones from so many bytes on.
    func canRankKeys(for queries: MLXArray, scale: Float, secondReadBytes: Int) -> Bool {
        let (keys, values) = layouts
        guard scale != 0, queries.dtype == keys.dtype, queries.dtype == values.dtype else {
            return false
        }
        let used = length * keys.heads * keys.size * keys.dtype.size
        return packing != nil || Device.defaultDevice().deviceType == .gpu
            || used >= secondReadBytes
    }

    /// Attention of at most 8 queries; the importance becomes the ranks of the keys.
    mutating func attendAndRank<Rows: CacheRows>(
        _ kind: Rows.Type, _ queries: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode, sharedHeads: Bool
    ) throws -> MLXArray {
        let (keyParts, valueParts) = fetch()
        let (keys, values) = (Rows.rows(of: keyParts), Rows.rows(of: valueParts))
        let (bits, groupSize) = (packing?.bits ?? 8, packing?.groupSize ?? 64)
        let followed = keyRanks.flatMap { $0.replaced < KeyRanks.afresh ? $0 : nil }
        let known =
            try followed?.withAppended(to: self)
            ?? KeyRanks(statistics: statistics(ofKeys: keyParts))
        let (found, logits) = try MLXFast.scaledDotProductAttentionWithProbes(
            queries: queries, keys: keys, values: values,
            probes: probes(known.statistics.keySum, dtype: queries.dtype), scale: scale, bits: bits,
            groupSize: groupSize, valueBits: packing?.valueBits, mask: mask)
        let ranks = logits.sum(axis: 2) * (known.statistics.inverseNorms * (-1 / scale))
        importance = sharedHeads ? sharedByHeads(ranks) : ranks
        keyRanks = known
        keyRanks?.areCurrent = true
        return found.output
    }

    /// Of keys that are stored as ours are.
    fileprivate func statistics(ofKeys parts: [MLXArray]) throws -> KeyStatistics {
        guard let packing else { return try keyStatistics(parts[0]) }
        return try keyStatistics(
            PackedRows.rows(of: parts), bits: packing.bits, groupSize: packing.groupSize)
    }
}

/// The mean of the ranks [B, H, N] of all heads in the place of each head's own. The heads hold the
/// same rows in the same slots, and NaN in one of them is NaN in the mean.
func sharedByHeads(_ ranks: MLXArray) -> MLXArray {
    broadcast(ranks.mean(axis: 1, keepDims: true), to: ranks.shape)
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
