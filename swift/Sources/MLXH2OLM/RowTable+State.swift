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
            state[2 * sides].dtype == .float32, state[2 * sides + 1].dtype == .int32
        else {
            throw H2OError(
                "H2OKVCache.state",
                "found arrays of shapes \(shapes), expected \(Self.expected(sides)), scores float32 "
                    + "[B, H, N] and positions int32 [B, H, N].")
        }
        let (keys, values) = (Array(state[..<sides]), Array(state[sides..<2 * sides]))
        let packing = RowPacking(configuration, stored: keys)
        self.init(
            keys: keys, values: values, importance: state[2 * sides],
            positions: state[2 * sides + 1], packing: packing)
        guard let packing else { return }
        for (parts, bits) in [(keys, packing.bits), (values, packing.valueBits)] {
            let size = parts[1].dim(3) * packing.groupSize
            let fits =
                parts[0].dtype == .uint32 && [32, 64, 128].contains(packing.groupSize)
                && parts[0].dim(3) * 32 == size * bits && parts[2].shape == parts[1].shape
                && parts[1].dtype == parts[2].dtype
            guard fits else {
                throw H2OError(
                    "H2OKVCache.state",
                    "found words, scales and biases of shapes \(parts.map(\.shape)), expected rows "
                        + "of \(bits) bits in groups of \(packing.groupSize).")
            }
        }
    }

    private static func expected(_ sides: Int) -> String {
        sides == 1
            ? "keys [B, H, N, D], values [B, H, N, Dv]"
            : "words, scales and biases of the keys and of the values, [B, H, N, ...] each"
    }
}
