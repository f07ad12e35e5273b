import MLX
import MLXH2O

// How the settings ask for rows to be stored.
extension H2OConfiguration.Format {
    /// Whether the newest rows are not packed yet.
    var hasTail: Bool { denseSize ?? 0 > 0 }

    /// The number of arrays for stored keys, and for values, in each segment.
    var parts: [(keys: Int, values: Int)] {
        guard let kvFormat else {
            return kvBits == nil ? [(1, 1)] : hasTail ? [(3, 3), (1, 1)] : [(3, 3)]
        }
        return [([0: 1, 8: 3][kvFormat.keyBits] ?? 2, 2)]
    }

    /// Their bits, where packed; 0: rows are not packed.
    var storedBits: (keys: Int, values: Int) {
        (kvFormat?.keyBits ?? kvBits ?? 0, kvFormat?.valueBits ?? valueBits ?? kvBits ?? 0)
    }

    /// The packing for rows like these, in each segment.
    ///
    /// - Throws: `H2OError` that names the owner, if rows of these sizes cannot be stored so
    func packings(
        of keys: MLXArray, _ values: MLXArray, owner: String
    ) throws -> [(keys: RowPacking?, values: RowPacking?)] {
        guard let kvFormat else {
            guard let kvBits else { return [(nil, nil)] }
            let sizes = [keys.dim(3), values.dim(3)]
            let size = try groupSize(isFramed ? sizes.map(Frame.keptSize) : sizes, owner)
            let packed = (
                keys: RowPacking.affine(bits: kvBits, groupSize: size),
                values: RowPacking.affine(bits: valueBits ?? kvBits, groupSize: size)
            )
            return hasTail ? [packed, (nil, nil)] : [packed]
        }
        func codes(_ bits: Int, _ rows: MLXArray, ofValues: Bool) throws -> RowPacking {
            guard hasCodes(rows.dim(3)) else {
                throw H2OError(
                    "H2OKVCache",
                    "\(owner) has \(ofValues ? "values" : "keys") of \(rows.dim(3)) elements, and "
                        + "kvFormat is '\(kvFormat.rawValue)': expected a power of two from 32 to "
                        + "1024, or kvBits.")
            }
            return .codes(bits: bits, ofValues: ofValues, dtype: rows.dtype)
        }
        let own: RowPacking? =
            switch kvFormat.keyBits {
            case 0: nil
            case 8: .affine(bits: 8, groupSize: try groupSize([keys.dim(3)], owner))
            default: try codes(kvFormat.keyBits, keys, ofValues: false)
            }
        return [(own, try codes(kvFormat.valueBits, values, ofValues: true))]
    }

    /// `kvGroupSize`, or 32 for sizes that it does not divide.
    private func groupSize(_ sizes: [Int], _ owner: String) throws -> Int {
        let fitting = [kvGroupSize, 32].first { size in sizes.allSatisfy { $0 % size == 0 } }
        guard let fitting else {
            throw H2OError(
                "QuantizedH2OKVCache",
                "\(owner) has keys of \(sizes[0]) and values of \(sizes[sizes.count - 1]) elements, "
                    + "which neither kvGroupSize = \(kvGroupSize) nor 32 divides: expected multiples "
                    + "of 32, or kvBits nil.")
        }
        return fitting
    }
}
