import MLX
import MLXH2O

extension RowTable {
    /// From the arrays of a cache's `state`; nil where there are none.
    init?(state: [MLXArray], _ configuration: H2OConfiguration) throws {
        if state.isEmpty { return nil }
        let shapes = state.map(\.shape)
        let sides = configuration.kvBits == nil ? 1 : 3
        guard state.count == 2 * sides + 2, shapes.dropLast(2).allSatisfy({ $0.count == 4 }),
            shapes.allSatisfy({ $0.prefix(3) == shapes[0].prefix(3) }),
            shapes.suffix(2).allSatisfy({ $0.count == 3 }), !shapes.joined().contains(0),
            state[2 * sides].dtype == .float32, state[2 * sides + 1].dtype == .int32,
            sides == 3 || state[..<2].allSatisfy({ $0.dtype.isFloatingPoint })
        else {
            throw H2OError(
                "H2OKVCache.state",
                "found arrays of shapes \(shapes), expected \(Self.expected(sides)), scores float32 "
                    + "[B, H, N] and positions int32 [B, H, N].")
        }
        let bits = configuration.kvBits
        guard let keys = Column(stored: Array(state[..<sides]), bits: bits),
            let values = Column(
                stored: Array(state[sides..<2 * sides]), bits: configuration.valueBits ?? bits),
            keys.packing?.groupSize == values.packing?.groupSize
        else {
            throw H2OError(
                "H2OKVCache.state",
                "found \(zip(state, shapes).prefix(2 * sides).map { "\($0.dtype) \($1)" }), expected "
                    + "keys of \(bits ?? 0) bits and values of \(configuration.valueBits ?? bits ?? 0),"
                    + " words uint32, in groups of the same size: 32, 64 or 128.")
        }
        self.init(
            keys: keys, values: values, importance: state[2 * sides],
            positions: state[2 * sides + 1], isMerged: configuration.makePolicy().merges)
    }

    private static func expected(_ sides: Int) -> String {
        sides == 1
            ? "keys [B, H, N, D], values [B, H, N, Dv]"
            : "words, scales and biases of the keys and of the values, [B, H, N, ...] each"
    }
}
