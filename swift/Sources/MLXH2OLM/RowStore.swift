import MLX
import MLXH2O

/// Rows of one layer: keys and values with room to grow, and what is remembered of each row.
///
/// Keys and values are one array each, or words, scales and biases: rows are quantised once, when
/// they come, straight into their slots, and moved as they are packed. Every update puts new array
/// objects in the place of the old ones and keeps no other reference, so that MLX can reuse their
/// buffers, and an array that someone else holds never changes. Nothing is evaluated.
struct RowStore {
    /// Each [B, H, capacity, ...], with unused rows at the end.
    var keys: [MLXArray]
    var values: [MLXArray]
    /// float32 [B, H, length]; NaN where not yet scored.
    var importance: MLXArray {
        didSet { knownWorst = nil }
    }
    /// int32 [B, H, length].
    var positions: MLXArray
    /// How the rows are packed; nil: they are not.
    let packing: RowPacking?
    /// What is known of the stored keys, where attention ranks them.
    var keyRanks: KeyRanks?
    /// The row that goes next, where attention has named it.
    var knownWorst: KnownWorst?

    private static let step = 256

    /// Stores nothing yet, for rows of these shapes and dtypes.
    init(emptyLike keys: MLXArray, _ values: MLXArray, packing: RowPacking?) {
        let heads = Array(keys.shape.prefix(2))
        self.init(
            keys: Self.parts(of: keys, packing?.bits, packing).map { $0[0..., 0..., ..<0] },
            values: Self.parts(of: values, packing?.valueBits, packing).map {
                $0[0..., 0..., ..<0]
            },
            importance: .zeros(heads + [0], dtype: .float32),
            positions: .zeros(heads + [0], dtype: .int32), packing: packing)
    }

    init(
        keys: [MLXArray], values: [MLXArray], importance: MLXArray, positions: MLXArray,
        packing: RowPacking?
    ) {
        self.keys = keys
        self.values = values
        self.importance = importance
        self.positions = positions
        self.packing = packing
    }

    var length: Int { positions.dim(2) }

    /// Every stored array, those of the keys first.
    var arrays: [MLXArray] { keys + values + remembered }

    /// What is remembered of the rows.
    var remembered: [MLXArray] {
        let named = knownWorst.map { [$0.slots] } ?? []
        return [importance, positions] + (keyRanks?.statistics.arrays ?? []) + named
    }

    /// Every stored byte, unused rows included.
    var nbytes: Int { arrays.reduce(0) { $0 + $1.nbytes } }

    /// The rows in use, as they are stored.
    func fetch() -> (keys: [MLXArray], values: [MLXArray]) {
        (keys.map { $0[0..., 0..., ..<length] }, values.map { $0[0..., 0..., ..<length] })
    }

    /// The rows in use as arrays [B, H, length, D] and [B, H, length, Dv].
    func dense() -> (keys: MLXArray, values: MLXArray) {
        let (keys, values) = fetch()
        guard let packing else { return (keys[0], values[0]) }
        return (
            unpacked(keys, bits: packing.bits, packing),
            unpacked(values, bits: packing.valueBits, packing)
        )
    }

    /// What new rows must look like: dtype and sizes but the length, of keys and of values.
    var layouts: (keys: RowLayout, values: RowLayout) {
        (RowLayout(keys, packing), RowLayout(values, packing))
    }

    /// Add rows behind the others, at positions `offset` and up, unscored. `limit` is the length
    /// beyond which no room is made in advance.
    mutating func append(
        _ newKeys: MLXArray, _ newValues: MLXArray, offset: Int, limit: Int
    ) throws {
        let start = length
        let added = newKeys.dim(2)
        let end = start + added
        if end > min(keys[0].dim(2), values[0].dim(2)) {
            let rounded = (end + Self.step - 1) / Self.step * Self.step
            let room = max(end, min(rounded, limit)) - end
            keys = zip(keys, Self.parts(of: newKeys, packing?.bits, packing)).map {
                grown($0, used: start, $1, room: room)
            }
            values = zip(values, Self.parts(of: newValues, packing?.valueBits, packing)).map {
                grown($0, used: start, $1, room: room)
            }
        } else {
            try write(newKeys, newValues, at: start)
        }
        let heads = Array(newKeys.shape.prefix(2))
        let unscored = MLXArray.full(heads + [added], values: MLXArray(Float.nan), dtype: .float32)
        let new = broadcast(
            MLXArray(Int32(offset)..<Int32(offset + added)), to: heads + [added])
        importance = concatenated([importance, unscored], axis: 2)
        positions = concatenated([positions, new], axis: 2)
        keyRanks?.areCurrent = false
    }

    private mutating func write(
        _ newKeys: MLXArray, _ newValues: MLXArray, at start: Int
    ) throws {
        guard let packing else {
            keys = [assigned(keys[0], at: start, newKeys)]
            values = [assigned(values[0], at: start, newValues)]
            return
        }
        let slots = MLXArray(Int32(start)..<Int32(start + newKeys.dim(2))).asType(.uint32)
        let (packedKeys, packedValues) = try quantizeAppend(
            keys: .rows(of: keys), values: .rows(of: values), newKeys: newKeys,
            newValues: newValues, slots: broadcast(slots, to: newKeys.shape.prefix(3)),
            bits: packing.bits, groupSize: packing.groupSize, valueBits: packing.valueBits)
        (keys, values) = (packedKeys.parts, packedValues.parts)
    }

    /// Write one new row over the worst row of each head: O(1) rows moved.
    mutating func replaceWorst(
        _ newKeys: MLXArray, _ newValues: MLXArray, position: Int, zones: Zones,
        ranks: RowRanks
    ) throws {
        cut()
        if packing == nil {
            try replace(MLXArray.self, newKeys, newValues, position, zones, ranks)
        } else {
            try replace(PackedRows.self, newKeys, newValues, position, zones, ranks)
        }
    }

    private mutating func replace<Rows: CacheRows>(
        _ kind: Rows.Type, _ newKeys: MLXArray, _ newValues: MLXArray, _ position: Int,
        _ zones: Zones, _ ranks: RowRanks
    ) throws {
        let followed = areRanked ? keyRanks : nil
        let found = try MLXH2O.replaceWorst(
            keys: Rows.rows(of: keys), values: Rows.rows(of: values), importance: importance,
            positions: positions, newKeys: newKeys, newValues: newValues, position: position,
            sinkSize: zones.sinkSize, recentStart: zones.recentStart, ranks: ranks,
            worst: knownWorst.flatMap { $0.zones == zones ? $0.slots : nil },
            statistics: followed?.statistics, bits: packing?.bits ?? 8,
            groupSize: packing?.groupSize ?? 64, valueBits: packing?.valueBits)
        (keys, values) = (found.keys.parts, found.values.parts)
        (importance, positions) = (found.importance, found.positions)
        keyRanks = found.statistics.map {
            KeyRanks(statistics: $0, replaced: (followed?.replaced ?? 0) + 1)
        }
    }

    /// Keep only `slots` [B, H, n], in that order; no unused rows remain. O(n) rows moved.
    ///
    /// With the slots of the others, `gone`, what is known of the keys stays known: that reads the
    /// keys that go.
    mutating func keep(_ slots: MLXArray, gone: MLXArray? = nil) throws {
        keyRanks = try gone.flatMap { try keyRanks?.without($0, keeping: slots, of: self) }
        keys = keys.map { gathered($0, slots) }
        values = values.map { gathered($0, slots) }
        importance = takeAlong(importance, slots, axis: 2)
        positions = takeAlong(positions, slots, axis: 2)
    }

    /// Forget the rows from slot `length` on; their space stays.
    mutating func truncate(to length: Int) {
        importance = importance[0..., 0..., ..<length]
        positions = positions[0..., 0..., ..<length]
        keyRanks = nil
    }

    /// Give up the unused rows.
    private mutating func cut() {
        if (keys + values).contains(where: { $0.dim(2) != length }) { (keys, values) = fetch() }
    }

    /// Rows as they are stored: the array, or words, scales and biases.
    private static func parts(of rows: MLXArray, _ bits: Int?, _ packing: RowPacking?) -> [MLXArray]
    {
        guard let packing, let bits else { return [rows] }
        let (words, scales, biases) = quantized(rows, groupSize: packing.groupSize, bits: bits)
        return [words, scales] + (biases.map { [$0] } ?? [])
    }
}

private func unpacked(_ parts: [MLXArray], bits: Int, _ packing: RowPacking) -> MLXArray {
    // Contiguous: MLX has dequantised views of a larger buffer wrongly on some GPUs.
    let whole = parts.map { contiguous($0) }
    return dequantized(
        whole[0], scales: whole[1], biases: whole[2], groupSize: packing.groupSize, bits: bits)
}

private func grown(_ buffer: MLXArray, used: Int, _ rows: MLXArray, room: Int) -> MLXArray {
    let shape = Array(rows.shape.prefix(2)) + [room, rows.dim(3)]
    let parts = [buffer[0..., 0..., ..<used], rows, MLXArray.zeros(shape, dtype: rows.dtype)]
    return concatenated(parts.filter { $0.dim(2) > 0 }, axis: 2)
}

private func assigned(_ buffer: MLXArray, at start: Int, _ rows: MLXArray) -> MLXArray {
    // An object of our own: assignment changes the object that it is made on.
    let result = buffer[.ellipsis]
    result[0..., 0..., start..<start + rows.dim(2)] = rows
    return result
}

func gathered(_ buffer: MLXArray, _ slots: MLXArray) -> MLXArray {
    let wide = broadcast(
        slots.expandedDimensions(axis: -1), to: slots.shape + [buffer.dim(3)])
    return takeAlong(buffer, wide, axis: 2)
}
