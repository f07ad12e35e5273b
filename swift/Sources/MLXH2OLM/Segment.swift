import MLX
import MLXH2O

/// Rows in one format.
struct Segment {
    /// With unused rows at the end, like `values`.
    var keys: Column
    var values: Column
    /// Rows of each head in use: the first.
    var length: Int

    private static let step = 256

    /// The packing arguments of operations; nil: no rows are packed.
    var packing: MLXFast.Packing? {
        guard let ofValues = values.packing else { return nil }
        return (keys.packing?.bits ?? 8, keys.packing?.groupSize ?? 64, ofValues.bits)
    }

    /// The first `count` rows, without room for more.
    func first(_ count: Int) -> Segment {
        var found = with { $0.rows(upTo: count) }
        found.length = count
        return found
    }

    /// Queries, and the rows in use as operations take them: dense rows in one dtype with queries.
    func read(by queries: MLXArray) -> (queries: MLXArray, keys: Column, values: Column) {
        let used = first(length)
        guard packing == nil else { return (queries, used.keys, used.values) }
        let rows = sameDType([queries, used.keys.parts[0], used.values.parts[0]])
        return (rows[0], .rows(of: [rows[1]]), .rows(of: [rows[2]]))
    }

    /// The same with every array of the rows changed.
    func with(_ change: (MLXArray) -> MLXArray) -> Segment {
        Segment(keys: keys.with(change), values: values.with(change), length: length)
    }

    /// Append rows. Beyond the length `limit`, no spare room is made.
    mutating func append(_ newKeys: MLXArray, _ newValues: MLXArray, limit: Int) throws {
        let rows = length + newKeys.dim(2)
        if rows > min(keys.capacity, values.capacity) {
            let rounded = (rows + Self.step - 1) / Self.step * Self.step
            let room = max(rows, min(rounded, limit)) - rows
            keys = try keys.grown(used: length, newKeys, room: room)
            values = try values.grown(used: length, newValues, room: room)
        } else if let packing {
            let slots = MLXArray(UInt32(length)..<UInt32(rows))
            let (packedKeys, packedValues) = try quantizeAppend(
                keys: keys, values: values, newKeys: newKeys, newValues: newValues,
                slots: broadcast(slots, to: newKeys.shape.prefix(3)), bits: packing.bits,
                groupSize: packing.groupSize, valueBits: packing.valueBits)
            keys = Column(parts: packedKeys.parts, packing: keys.packing)
            values = Column(parts: packedValues.parts, packing: values.packing)
        } else {
            keys = keys.with { $0.writing(newKeys, from: length) }
            values = values.with { $0.writing(newValues, from: length) }
        }
        length = rows
    }
}
