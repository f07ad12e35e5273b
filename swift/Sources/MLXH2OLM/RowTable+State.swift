import MLX
import MLXH2O

extension RowTable {
    /// From the arrays of a cache's `state`; nil if there are none. Codes do not record `dtype`,
    /// that of the rows (nil: of the keys), and padded values not their original `valueSize`.
    init?(
        state given: [MLXArray], _ format: H2OConfiguration.Format, dtype: DType? = nil,
        valueSize: Int? = nil
    ) throws {
        if given.isEmpty { return nil }
        var rest = given[...]
        func take(_ count: Int) -> [MLXArray] {
            defer { rest = rest.dropFirst(count) }
            return Array(rest.prefix(count))
        }
        let parts = format.parts
        let keys = parts.map { take($0.keys) }
        let keyCentre = take(format.isFramed ? 1 : 0).first
        let values = parts.map { take($0.values) }
        // Earlier versions wrote none.
        let valueCentre = take(format.isFramed && rest.first?.ndim == 4 ? 1 : 0).first
        let (rows, shape) = (zip(keys, values).map { $0 + $1 }, rest.last?.shape ?? [])
        func fit(_ arrays: [MLXArray]) -> Bool {
            arrays.allSatisfy {
                $0.ndim == 4 && $0.shape.prefix(2) == shape.prefix(2) && $0.dim(3) > 0
                    && $0.dim(2) == arrays[0].dim(2)
            }
        }
        guard (2...3).contains(rest.count), shape.count == 3, !shape.contains(0),
            rest.allSatisfy({ $0.shape == shape }), rows.allSatisfy(fit),
            rows.reduce(0, { $0 + $1[0].dim(2) }) == shape[2],
            rest.dropLast().allSatisfy({ $0.dtype == .float32 }), rest.last?.dtype == .int32
        else {
            let count = parts.reduce(format.isFramed ? 2 : 0) { $0 + $1.keys + $1.values }
            throw H2OError(
                "H2OKVCache.state",
                "found arrays of shapes \(given.map(\.shape)), expected \(count) of keys and "
                    + "values, [B, H, N, ...] each, scores float32 [B, H, N], biases like them where rows "
                    + "were folded, and positions int32 [B, H, N].")
        }
        let bits = format.storedBits
        let segments = zip(keys, values).compactMap { keys, values -> Segment? in
            guard
                let own = Column(stored: keys, bits: bits.keys, ofValues: false, dtype: dtype),
                let others = Column(
                    stored: values, bits: bits.values, ofValues: true,
                    dtype: dtype ?? own.layout.dtype),
                values.count == 2 || own.packing?.groupSize == others.packing?.groupSize
            else { return nil }
            return Segment(keys: own, values: others, length: own.capacity)
        }
        let layouts = segments.map { [$0.keys.layout, $0.values.layout] }
        let frame = layouts.first.flatMap { layout in
            keyCentre.flatMap { Frame(stored: $0, valueCentre, valueSize: valueSize, for: layout) }
        }
        guard layouts.count == parts.count, Set(layouts).count == 1,
            format.isFramed == (frame != nil)
        else {
            let sizes = valueSize.map { " and values of \($0) elements" } ?? ""
            throw H2OError(
                "H2OKVCache.state",
                "found \(given.map { "\($0.dtype) \($0.shape)" })\(sizes), expected "
                    + "keys of \(bits.keys) bits and values of \(bits.values), words uint32, in "
                    + "groups of the same size: 32, 64 or 128; norms float32; or rows of floats; in "
                    + "a frame with centres [B, H, 1, D] of rows that are padded to these sizes.")
        }
        let beside = Array(rest)
        self.init(
            segments, importance: beside[0], positions: beside[beside.count - 1], frame: frame)
        if beside.count == 3 { bias = beside[1] }
        let sorted = sorted(positions, axis: 2)
        let next = sorted[0..., 0..., 1...] .> sorted[0..., 0..., ..<(length - 1)]
        guard next.asArray(Bool.self).allSatisfy({ $0 }), lastPosition < Int(Int32.max),
            sorted[0..., 0..., ..<1].asArray(Int32.self).allSatisfy({ $0 >= 0 })
        else {
            throw H2OError(
                "H2OKVCache.state",
                "found positions that are equal, negative or 2^31 - 1, expected \(length) others.")
        }
    }

    var lastPosition: Int { positions.reshaped(-1).max(axis: 0).item(Int.self) }

    /// Keys, values, scores and positions of the rows in use, each in as many arrays as it has.
    var parts: [[MLXArray]] {
        let rows = segments.map { $0.first($0.length) }
        return [
            rows.flatMap(\.keys.parts) + centres.prefix(1),
            rows.flatMap(\.values.parts) + centres.dropFirst(),
            [importance] + (bias.map { [$0] } ?? []), [positions],
        ]
    }

    /// Find the newest tokens whose rows are all there, in order, at the end: a trim may take these
    /// back from stored rows.
    mutating func findCertain(of tokens: Int) {
        let (first, places) = (tokens - length, MLXArray(Int32(0)..<Int32(length)))
        let gone = which(positions - places .== Int32(clamping: first), Int32(0), places + Int32(1))
        certain = first + gone.reshaped(-1).max(axis: 0).item(Int.self)
    }
}
