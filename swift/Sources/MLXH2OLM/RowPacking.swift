import MLX
import MLXH2O

/// Bits of keys and of values, and the size of a group.
struct RowPacking: Equatable {
    let bits: Int
    let valueBits: Int
    let groupSize: Int

    /// What the settings ask for, for rows of these sizes; nil: rows stay as they come.
    ///
    /// Sizes that `kvGroupSize` does not divide take groups of 32.
    init?(
        _ configuration: H2OConfiguration, keySize: Int, valueSize: Int, owner: String
    ) throws {
        guard let bits = configuration.kvBits else { return nil }
        let sizes = [configuration.kvGroupSize, 32]
        let fitting = sizes.first { keySize % $0 == 0 && valueSize % $0 == 0 }
        guard let groupSize = fitting else {
            throw H2OError(
                "QuantizedH2OKVCache",
                "\(owner) has keys of \(keySize) and values of \(valueSize) elements, which neither "
                    + "kvGroupSize = \(configuration.kvGroupSize) nor 32 divides: expected "
                    + "multiples of 32, or kvBits nil.")
        }
        self.init(
            bits: bits, valueBits: configuration.valueBits ?? bits, groupSize: groupSize)
    }

    private init(bits: Int, valueBits: Int, groupSize: Int) {
        self.bits = bits
        self.valueBits = valueBits
        self.groupSize = groupSize
    }

    /// How stored arrays are packed, by the settings and their own shapes.
    init?(_ configuration: H2OConfiguration, stored keys: [MLXArray]) {
        guard let bits = configuration.kvBits, keys.count == 3, keys[0].ndim == 4,
            keys[1].ndim == 4, keys[1].dim(3) > 0
        else { return nil }
        self.init(
            bits: bits, valueBits: configuration.valueBits ?? bits,
            groupSize: keys[0].dim(3) * 32 / bits / keys[1].dim(3))
    }
}

/// What rows of one kind have in common: everything but their number.
struct RowLayout: Equatable, CustomStringConvertible {
    let batch: Int
    let heads: Int
    let size: Int
    let dtype: DType

    init(_ rows: MLXArray) {
        self.init(rows, size: rows.dim(3))
    }

    /// Of stored parts.
    init(_ parts: [MLXArray], _ packing: RowPacking?) {
        guard let packing else {
            self.init(parts[0])
            return
        }
        self.init(parts[1], size: parts[1].dim(3) * packing.groupSize)
    }

    private init(_ part: MLXArray, size: Int) {
        batch = part.dim(0)
        heads = part.dim(1)
        dtype = part.dtype
        self.size = size
    }

    var description: String { "\(dtype) with B = \(batch), H = \(heads), row size \(size)" }
}
