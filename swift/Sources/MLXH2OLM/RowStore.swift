import MLX

/// Rows of one layer: keys and values with room to grow, and what is remembered of each row.
///
/// Every update puts new array objects in the place of the old ones and keeps no other reference,
/// so that MLX can reuse their buffers, and an array that someone else holds never changes. Nothing
/// is evaluated.
struct RowStore {
    /// [B, H, capacity, D], with unused rows at the end.
    var keys: MLXArray
    /// [B, H, capacity, Dv], with unused rows at the end.
    var values: MLXArray
    /// float32 [B, H, length]; NaN where not yet scored.
    var importance: MLXArray
    /// int32 [B, H, length].
    var positions: MLXArray

    private static let step = 256

    /// Stores nothing yet, for rows of these shapes and dtypes.
    init(emptyLike keys: MLXArray, _ values: MLXArray) {
        let heads = Array(keys.shape.prefix(2))
        self.init(
            keys: .zeros(heads + [0, keys.dim(3)], dtype: keys.dtype),
            values: .zeros(heads + [0, values.dim(3)], dtype: values.dtype),
            importance: .zeros(heads + [0], dtype: .float32),
            positions: .zeros(heads + [0], dtype: .int32))
    }

    init(keys: MLXArray, values: MLXArray, importance: MLXArray, positions: MLXArray) {
        self.keys = keys
        self.values = values
        self.importance = importance
        self.positions = positions
    }

    var length: Int { positions.dim(2) }

    /// Every stored byte, unused rows included.
    var nbytes: Int { [keys, values, importance, positions].reduce(0) { $0 + $1.nbytes } }

    /// The rows in use.
    func fetch() -> (keys: MLXArray, values: MLXArray) {
        (keys[0..., 0..., ..<length], values[0..., 0..., ..<length])
    }

    /// Add rows behind the others, at positions `offset` and up, unscored. `limit` is the length
    /// beyond which no room is made in advance.
    mutating func append(_ newKeys: MLXArray, _ newValues: MLXArray, offset: Int, limit: Int) {
        let start = length
        let added = newKeys.dim(2)
        let end = start + added
        if end > min(keys.dim(2), values.dim(2)) {
            let rounded = (end + Self.step - 1) / Self.step * Self.step
            let room = max(end, min(rounded, limit)) - end
            keys = grown(keys, used: start, newKeys, room: room)
            values = grown(values, used: start, newValues, room: room)
        } else {
            keys = assigned(keys, at: start, newKeys)
            values = assigned(values, at: start, newValues)
        }
        let heads = Array(newKeys.shape.prefix(2))
        let unscored = MLXArray.full(heads + [added], values: MLXArray(Float.nan), dtype: .float32)
        let new = broadcast(
            MLXArray(Int32(offset)..<Int32(offset + added)), to: heads + [added])
        importance = concatenated([importance, unscored], axis: 2)
        positions = concatenated([positions, new], axis: 2)
    }

    /// Write one new row over the slot `slots` [B, H, 1] of each head: O(1) rows moved.
    mutating func replace(
        _ slots: MLXArray, _ newKeys: MLXArray, _ newValues: MLXArray, offset: Int
    ) {
        keys = written(keys, slots, newKeys)
        values = written(values, slots, newValues)
        importance = putAlong(importance, slots, values: MLXArray(Float.nan), axis: 2)
        positions = putAlong(positions, slots, values: MLXArray(Int32(offset)), axis: 2)
    }

    /// Keep only `slots` [B, H, n], in that order; no unused rows remain. O(n) rows moved.
    mutating func keep(_ slots: MLXArray) {
        keys = gathered(keys, slots)
        values = gathered(values, slots)
        importance = takeAlong(importance, slots, axis: 2)
        positions = takeAlong(positions, slots, axis: 2)
    }

    /// Forget the rows from slot `length` on; their space stays.
    mutating func truncate(to length: Int) {
        importance = importance[0..., 0..., ..<length]
        positions = positions[0..., 0..., ..<length]
    }
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

private func perColumn(_ slots: MLXArray, _ width: Int) -> MLXArray {
    broadcast(slots.expandedDimensions(axis: -1), to: slots.shape + [width])
}

private func written(_ buffer: MLXArray, _ slots: MLXArray, _ rows: MLXArray) -> MLXArray {
    putAlong(buffer, perColumn(slots, buffer.dim(3)), values: rows, axis: 2)
}

private func gathered(_ buffer: MLXArray, _ slots: MLXArray) -> MLXArray {
    takeAlong(buffer, perColumn(slots, buffer.dim(3)), axis: 2)
}
