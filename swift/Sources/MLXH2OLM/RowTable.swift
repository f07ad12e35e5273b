import MLX
import MLXH2O

/// Rows of one layer as a table: a row is one slot in every column.
///
/// New rows are quantised once, straight into their slots, and moved as packed rows; only rows that
/// others are folded into are quantised again. Every event chooses slots, and then moves or writes
/// them in every column. Every update makes new array objects and drops the old ones, so that MLX
/// can reuse their buffers, and an array that something else holds never changes. Nothing is
/// evaluated.
struct RowTable {
    /// The last one takes new rows. If there are two, the first has packed rows, and the last one a
    /// tail of dense rows.
    private(set) var segments: [Segment]
    /// The frame of the rows; nil: none.
    private(set) var frame: Frame?
    /// For the first rows, float32; NaN for the rest.
    private var scored: MLXArray
    /// For the first rows, `ln n` of the n rows that each stands for, float32; 0 for the rest. Nil
    /// if no row has been folded.
    private var biases: MLXArray?
    /// For the first rows, int32; the rest are consecutive up to `end`.
    private var placed: MLXArray
    private var end = 0
    /// Scores of queries that may still be taken back.
    var waiting: [Waiting] = []
    /// Rows of earlier tokens may have been evicted, so no trim goes back beyond this position.
    var certain = 0
    /// Scores, positions or biases have changed since attention was last tied to them.
    var isChanged = true

    init(
        _ segments: [Segment], importance: MLXArray, positions: MLXArray, frame: Frame? = nil
    ) {
        self.frame = frame
        self.segments = segments
        scored = importance
        placed = positions
    }

    /// An empty table for rows of these shapes and dtypes. Sizes that `kvGroupSize` does not divide
    /// use groups of 32.
    init(
        emptyFor keys: MLXArray, _ values: MLXArray, _ format: H2OConfiguration.Format,
        owner: String
    ) throws {
        let packings = try format.packings(of: keys, values, owner: owner)
        let heads = Array(keys.shape.prefix(2))
        let rows = (keys: keys.rows(upTo: 1), values: values.rows(upTo: 1))
        let frame = format.isFramed ? Frame(of: rows.keys, rows.values) : nil
        let kept = frame?.into(rows.keys, rows.values) ?? rows
        self.init(
            try packings.map {
                let keys = try Column(kept.keys, $0.keys)
                return Segment(keys: keys, values: try Column(kept.values, $0.values), length: 0)
                    .first(0)
            },
            importance: .zeros(heads + [0], dtype: .float32),
            positions: .zeros(heads + [0], dtype: .int32), frame: frame)
    }

    /// Rows of each head.
    var length: Int { segments.reduce(0) { $0 + $1.length } }

    /// The segment that takes new rows.
    var tail: Segment { segments[segments.count - 1] }

    /// The first segment, without room for more rows.
    var packed: Segment { segments[0].first(segments[0].length) }

    /// float32 [B, H, length]; NaN for unscored rows.
    var importance: MLXArray {
        get { scored.rows(filledTo: length, with: .nan) }
        set { scored = newValue }
    }

    /// float32 [B, H, length]: `ln n` of the n rows that each row stands for; nil if no row has
    /// been folded.
    var bias: MLXArray? {
        get { biases?.rows(filledTo: length, with: 0) }
        set { biases = newValue }
    }

    /// int32 [B, H, length].
    var positions: MLXArray {
        let known = placed.dim(2)
        guard known < length else { return placed }
        let others = MLXArray(Int32(end - (length - known))..<Int32(end))
        return concatenated([placed, broadcast(others, to: heads + [length - known])], axis: 2)
    }

    /// B and H.
    private var heads: [Int] { [placed.dim(0), placed.dim(1)] }

    /// Every stored array, keys first.
    var arrays: [MLXArray] {
        segments.flatMap(\.keys.parts) + segments.flatMap(\.values.parts) + centres + remembered
    }

    /// The centres of keys and values, if they have a frame.
    var centres: [MLXArray] { frame.map { [$0.keyCentre, $0.valueCentre] } ?? [] }

    /// Scores, positions, biases and waiting scores.
    var remembered: [MLXArray] {
        [scored, placed] + (biases.map { [$0] } ?? []) + waiting.map(\.seen)
    }

    /// Every stored byte, unused rows included.
    var nbytes: Int { arrays.reduce(0) { $0 + $1.nbytes } }

    /// The rows in use as arrays [B, H, length, D] and [B, H, length, Dv]. `newest`, the last rows
    /// before packing, replace packed ones; evaluating the keys then evaluates these too.
    func dense(newest: (keys: MLXArray, values: MLXArray)? = nil) throws -> (
        keys: MLXArray, values: MLXArray
    ) {
        let newest = tail.packing == nil ? nil : newest
        let first = length - (newest?.keys.dim(2) ?? 0)
        let stored = segments.map { $0.first(min($0.length, first)) }.filter { $0.length > 0 }
        var kept = try stored.map { (try $0.keys.dense(), try $0.values.dense()) }
        if let frame { kept = kept.map { (frame.keysBack($0), frame.valuesBack($1)) } }
        if let newest { kept.append(newest) }
        let keys = concatenated(kept.map(\.0), axis: 2)
        return (
            newest == nil
                ? keys : depends(input: keys, dependencies: tail.keys.parts + tail.values.parts),
            concatenated(kept.map(\.1), axis: 2)
        )
    }

    /// The layouts that new keys and values must have.
    var layouts: (keys: RowLayout, values: RowLayout) {
        guard let frame else { return (tail.keys.layout, tail.values.layout) }
        return (RowLayout(frame.keyCentre), RowLayout(frame.valueCentre))
    }

    // MARK: Rows that come

    /// Append rows at positions `offset` and up. Beyond the length `limit`, no spare room is made.
    mutating func append(
        _ newKeys: MLXArray, _ newValues: MLXArray, offset: Int, limit: Int
    ) throws {
        let added = newKeys.dim(2)
        if frame != nil, length == 0 { frame = Frame(of: newKeys, newValues) }
        let rows = frame?.into(newKeys, newValues) ?? (keys: newKeys, values: newValues)
        try segments[segments.count - 1].append(rows.keys, rows.values, limit: limit)
        end = offset + added
        waiting = waiting.map { $0.followed(by: added) }
    }

    /// Pack the rows of a dense tail, except the newest `count`.
    mutating func pack(leaving count: Int) throws {
        let (tail, older) = (tail, tail.length - count)
        guard segments.count > 1, older > 0 else { return }
        let rows = tail.first(older)
        try segments[0].append(rows.keys.parts[0], rows.values.parts[0], limit: .max)
        segments[1] = tail.with { contiguous($0[0..., 0..., older..<tail.length]) }
        segments[1].length = count
    }

    // MARK: Rows that go

    /// Fold those of `rows`, after the first `skip`, that are not in the slots `kept` [B, H, n] of
    /// them into others, which change in place. Sinks, recent rows and rows without a rank do not.
    mutating func fold(
        _ rows: PolicyRows, _ policy: any EvictionPolicy, by ranks: MLXArray,
        keeping kept: MLXArray, behind skip: Int
    ) throws {
        let (count, places) = (rows.positions.dim(2), rows.positions)
        let free =
            (places .>= MLXArray(Int32(rows.sinkSize)))
            .&& (places .< MLXArray(Int32(clamping: rows.recentStart))) .&& policy.takes(ranks)
        let biases = bias ?? .zeros(heads + [length], dtype: .float32)
        let found = try MLXH2O.fold(
            keys: rows.keys, values: rows.values, bias: biases[0..., 0..., skip..<skip + count],
            mass: rows.importance, weights: ranks, eligible: free, kept: kept,
            share: policy.foldShare)
        let made = frame?.into(found.keys, found.values) ?? (keys: found.keys, values: found.values)
        let into = skip == 0 ? found.into : found.into + UInt32(skip)
        segments[0].keys = try segments[0].keys.put(made.keys, at: into)
        segments[0].values = try segments[0].values.put(made.values, at: into)
        importance = putAlong(importance, into, values: found.mass, axis: 2)
        bias = putAlong(biases, into, values: found.bias, axis: 2)
        isChanged = true
    }

    /// Keep only `slots` [B, H, n], ascending, followed by the last `tail` rows, in order. Kept
    /// rows after slot n overwrite the other slots below it. O(length - n) rows move.
    mutating func fillHoles(keeping slots: MLXArray, tail: Int = 0) {
        let (kept, ranked) = (slots.dim(2), length - tail)
        let gone = ranked - kept
        // 0, -1, -2, ... at the lost slots, and 1 at the others: sorted, the lost slots come first,
        // from the last to the first.
        let falling = MLXArray((0..<Int32(ranked)).map { -$0 })
        let marks = putAlong(
            broadcast(falling, to: slots.shape.dropLast() + [ranked]), slots,
            values: MLXArray(Int32(1)), axis: 2)
        let lost = argSort(marks, axis: 2)[0..., 0..., ..<gone]
        // The holes are the last of the lost slots, and as many of the last kept rows lie after
        // slot n. Earlier pairs also write after slot n, where nothing is read.
        let moves = min(kept, gone)
        let sources = slots[0..., 0..., (kept - moves)...]
        let targets = lost[0..., 0..., (gone - moves)...]
        move(sources, to: targets)
        if tail > 0 {
            let all = slots.shape.dropLast() + [tail]
            let from = broadcast(MLXArray(Int32(ranked)..<Int32(length)), to: all)
            let to = broadcast(MLXArray(Int32(kept)..<Int32(kept + tail)), to: all)
            move(from, to: to, isTail: true)
        }
        if segments.count > 1 { segments[0].length = kept }
        truncate(to: kept + tail)
    }

    /// Drop the rows from slot `count` on, but keep their space.
    mutating func truncate(to count: Int) {
        end -= length - count
        var left = count
        for index in segments.indices {
            segments[index].length = min(segments[index].length, left)
            left -= segments[index].length
        }
        scored = scored.rows(upTo: count)
        biases = biases?.rows(upTo: count)
        placed = placed.rows(upTo: count)
        waiting = waiting.map { $0.with { $0.rows(upTo: count) } }
        isChanged = true
    }

    /// Free the room for more than `limit` rows, if it is unused.
    mutating func fit(_ limit: Int) {
        guard tail.length <= limit, tail.keys.capacity > limit else { return }
        segments[segments.count - 1] = tail.with { contiguous($0.rows(upTo: limit)) }
    }

    /// Copy the rows at `sources` [B, H, n] to the slots `targets` of the same shape. `isTail`: they
    /// are the last rows, which do not move where they have a segment of their own.
    private mutating func move(_ sources: MLXArray, to targets: MLXArray, isTail: Bool = false) {
        let wide = [sources, targets].map { $0.expandedDimensions(axis: -1) }
        func moved(_ column: MLXArray) -> MLXArray {
            let places = column.ndim == 3 ? [sources, targets] : wide
            return putAlong(
                column, places[1], values: takeAlong(column, places[0], axis: 2), axis: 2)
        }
        if !isTail || segments.count == 1 { segments[0] = segments[0].with(moved) }
        if scored.dim(2) > 0 { scored = moved(importance) }
        biases = bias.map(moved)
        placed = moved(positions)
        waiting = waiting.map { $0.with(moved) }
    }
}

extension MLXArray {
    /// The rows of [B, H, N, ...], padded with `value` to `count` rows.
    func rows(filledTo count: Int, with value: Float) -> MLXArray {
        guard dim(2) < count else { return self }
        var shape = shape
        shape[2] = count - dim(2)
        return concatenated([self, .full(shape, values: MLXArray(value), dtype: dtype)], axis: 2)
    }
}
