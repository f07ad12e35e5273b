import MLX
import MLXH2O

extension RowTable {
    /// From the arrays of a cache's `state`; nil where there are none. `dtype` is that in which rows
    /// come, where codes do not say it.
    init?(
        state: [MLXArray], _ configuration: H2OConfiguration, dtype: DType = .float32
    ) throws {
        if state.isEmpty { return nil }
        let shapes = state.map(\.shape)
        let (keyParts, valueParts) = configuration.parts
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
                "found arrays of shapes \(shapes), expected \(Self.expected(keyParts, valueParts)), "
                    + "scores float32 [B, H, N], biases like them where rows were folded, and "
                    + "positions int32 [B, H, N].")
        }
        let bits = configuration.storedBits
        guard
            let keys = Column(
                stored: Array(state[..<keyParts]), bits: bits.keys, ofValues: false, dtype: dtype),
            let values = Column(
                stored: Array(state[keyParts..<sides]), bits: bits.values, ofValues: true,
                dtype: dtype),
            valueParts == 2 || keys.packing?.groupSize == values.packing?.groupSize
        else {
            throw H2OError(
                "H2OKVCache.state",
                "found \(zip(state, shapes).prefix(sides).map { "\($0.dtype) \($1)" }), expected "
                    + "keys of \(bits.keys) bits and values of \(bits.values), words uint32, in "
                    + "groups of the same size: 32, 64 or 128; norms float32; or rows of floats.")
        }
        self.init(
            keys: keys, values: values, importance: state[sides],
            positions: state[state.count - 1])
        if beside == 3 { bias = state[sides + 1] }
    }

    private static func expected(_ keyParts: Int, _ valueParts: Int) -> String {
        func side(_ name: String, _ parts: Int) -> String {
            [
                "\(name)", "words and norms of the \(name)",
                "words, scales and biases of the \(name)",
            ][
                parts - 1]
        }
        return "\(side("keys", keyParts)) and \(side("values", valueParts)), [B, H, N, ...] each"
    }
}
