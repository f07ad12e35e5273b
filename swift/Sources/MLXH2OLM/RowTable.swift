import MLX
import MLXH2O

/// Rows of one layer as a table: a row is one slot of every column.
///
/// Keys and values are one column each, or words, scales and biases: rows are quantised once, when
/// they come, straight into their slots, and moved as they are packed. Whatever happens to rows is a
/// choice of slots, and then `taken` or `put` of every column. Every update puts new
/// array objects in the place of the old ones and keeps no other reference, so that MLX can reuse
/// their buffers, and an array that someone else holds never changes. Nothing is evaluated.
struct RowTable {
    /// Each [B, H, capacity, ...], with unused rows at the end.
    private(set) var keys: [MLXArray]
    private(set) var values: [MLXArray]
    /// float32 [B, H, length]; NaN where not yet scored.
    var importance: MLXArray
    /// int32 [B, H, length].
    private(set) var positions: MLXArray
    /// How the rows are packed; nil: they are not.
    let packing: RowPacking?

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
    var remembered: [MLXArray] { [importance, positions] }

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

    // MARK: Rows that come

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

    // MARK: Rows that go

    /// Keep only `slots` [B, H, n], in that order, in new memory. O(n) rows moved.
    mutating func keep(_ slots: MLXArray) { change { taken($0, slots) } }

    /// Keep only `slots` [B, H, n], ascending: of the others, those below slot n are overwritten by
    /// the rows that stay behind it. O(length - n) rows moved.
    mutating func fillHoles(keeping slots: MLXArray) {
        let (kept, gone) = (slots.dim(2), length - slots.dim(2))
        // 0, -1, -2, ... at the slots that go, and 1 at the others: sorted, they go from the last
        // slot to the first.
        let falling = MLXArray((0..<Int32(length)).map { -$0 })
        let marks = putAlong(
            broadcast(falling, to: positions.shape), slots, values: MLXArray(Int32(1)), axis: 2)
        let lost = argSort(marks, axis: 2)[0..., 0..., ..<gone]
        // The holes are the last of the lost slots, and as many of the last that stay lie behind
        // slot n. What the pairs before these write lies behind it too, where nothing is read.
        let moves = min(kept, gone)
        let sources = slots[0..., 0..., (kept - moves)...]
        let targets = lost[0..., 0..., (gone - moves)...]
        change { put(taken($0, sources), at: targets, of: $0) }
        truncate(to: kept)
    }

    /// Forget the rows from slot `length` on; their space stays.
    mutating func truncate(to length: Int) {
        importance = importance[0..., 0..., ..<length]
        positions = positions[0..., 0..., ..<length]
    }

    private mutating func change(_ column: (MLXArray) -> MLXArray) {
        (keys, values) = (keys.map(column), values.map(column))
        (importance, positions) = (column(importance), column(positions))
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

private func grown(_ column: MLXArray, used: Int, _ rows: MLXArray, room: Int) -> MLXArray {
    let shape = Array(rows.shape.prefix(2)) + [room, rows.dim(3)]
    let parts = [column[0..., 0..., ..<used], rows, MLXArray.zeros(shape, dtype: rows.dtype)]
    return concatenated(parts.filter { $0.dim(2) > 0 }, axis: 2)
}

private func assigned(_ column: MLXArray, at start: Int, _ rows: MLXArray) -> MLXArray {
    // An object of our own: assignment changes the object that it is made on.
    let result = column[.ellipsis]
    result[0..., 0..., start..<start + rows.dim(2)] = rows
    return result
}

/// The rows of a column at `slots` [B, H, n].
private func taken(_ column: MLXArray, _ slots: MLXArray) -> MLXArray {
    takeAlong(column, spread(slots, over: column), axis: 2)
}

/// A column with `rows` at `slots` [B, H, n].
private func put(_ rows: MLXArray, at slots: MLXArray, of column: MLXArray) -> MLXArray {
    putAlong(column, spread(slots, over: column), values: rows, axis: 2)
}

/// The slots for every element of a row.
private func spread(_ slots: MLXArray, over column: MLXArray) -> MLXArray {
    guard column.ndim > slots.ndim else { return slots }
    return broadcast(slots.expandedDimensions(axis: -1), to: slots.shape + [column.dim(3)])
}
