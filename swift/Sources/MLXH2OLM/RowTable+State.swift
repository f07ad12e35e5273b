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
        var state = given
        let place = format.parts.keys
        let centre = format.isFramed && state.count > place ? state.remove(at: place) : nil
        let shapes = state.map(\.shape)
        let (keyParts, valueParts) = format.parts
        let sides = keyParts + valueParts
        let beside = state.count - sides
        guard beside == 2 || beside == 3, shapes.prefix(sides).allSatisfy({ $0.count == 4 }),
            shapes.allSatisfy({ $0.prefix(3) == shapes[0].prefix(3) }),
            shapes.suffix(beside).allSatisfy({ $0.count == 3 }), !shapes.joined().contains(0),
            state[sides..<(state.count - 1)].allSatisfy({ $0.dtype == .float32 }),
            state[state.count - 1].dtype == .int32
        else {
            throw H2OError(
                "H2OKVCache.state",
                "found arrays of shapes \(shapes), expected \(Self.stored(keyParts))keys and "
                    + "\(Self.stored(valueParts))values, [B, H, N, ...] each, scores float32 [B, H, N], biases like them where rows were folded, and "
                    + "positions int32 [B, H, N].")
        }
        let bits = format.storedBits
        guard
            let keys = Column(
                stored: Array(state[..<keyParts]), bits: bits.keys, ofValues: false, dtype: dtype),
            let values = Column(
                stored: Array(state[keyParts..<sides]), bits: bits.values, ofValues: true,
                dtype: dtype ?? keys.layout.dtype),
            valueParts == 2 || keys.packing?.groupSize == values.packing?.groupSize
        else {
            throw H2OError(
                "H2OKVCache.state",
                "found \(zip(state, shapes).prefix(sides).map { "\($0.dtype) \($1)" }), expected "
                    + "keys of \(bits.keys) bits and values of \(bits.values), words uint32, in "
                    + "groups of the same size: 32, 64 or 128; norms float32; or rows of floats.")
        }
        let size = values.layout.size
        let frame = centre.map { Frame(centre: $0, valueSize: valueSize ?? size) }
        if let frame {
            let found = frame.centre.shape
            guard found.count == 4, found.prefix(2) == shapes[0].prefix(2), found[2] == 1,
                Frame.keptSize(found[3]) == keys.layout.size,
                Frame.keptSize(frame.valueSize) == size, frame.centre.dtype == keys.layout.dtype
            else {
                throw H2OError(
                    "H2OKVCache.state",
                    "found a centre \(frame.centre.dtype) \(found) and values of "
                        + "\(frame.valueSize) elements, expected \(keys.layout.dtype) "
                        + "[B, H, 1, D] of keys kept in \(keys.layout.size) elements and values "
                        + "in \(size).")
            }
        }
        self.init(
            keys: keys, values: values, importance: state[sides],
            positions: state[state.count - 1], frame: frame)
        if beside == 3 { bias = state[sides + 1] }
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
        let (keys, values) = fetch()
        let scores = [importance] + (bias.map { [$0] } ?? [])
        return [keys.parts + centre, values.parts, scores, [positions]]
    }

    /// Find the newest tokens whose rows are all there, in order, at the end: a trim may take these
    /// back from stored rows.
    mutating func findCertain(of tokens: Int) {
        let (first, places) = (tokens - length, MLXArray(Int32(0)..<Int32(length)))
        let gone = which(positions - places .== Int32(clamping: first), Int32(0), places + Int32(1))
        certain = first + gone.reshaped(-1).max(axis: 0).item(Int.self)
    }

    /// The words before the name of a side stored in this many parts.
    private static func stored(_ parts: Int) -> String {
        [2: "words and norms of the ", 3: "words, scales and biases of the "][parts] ?? ""
    }
}
