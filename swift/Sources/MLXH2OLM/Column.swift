import MLX
import MLXH2O

/// Bits of packed elements, and how many of them share a scale and a bias.
struct Packing: Equatable {
    let bits: Int
    let groupSize: Int
}

/// Keys or values of one layer as they are kept: an array, or words, scales and biases.
struct Column {
    /// Each [B, H, capacity, ...].
    let parts: [MLXArray]
    /// Nil: rows stay as they come.
    let packing: Packing?

    init(parts: [MLXArray], packing: Packing?) {
        self.parts = parts
        self.packing = packing
    }

    /// Of rows [B, H, N, D].
    init(_ rows: MLXArray, _ packing: Packing?) {
        guard let packing else {
            self.init(parts: [rows], packing: nil)
            return
        }
        let (words, scales, biases) = quantized(
            rows, groupSize: packing.groupSize, bits: packing.bits)
        self.init(parts: [words, scales] + (biases.map { [$0] } ?? []), packing: packing)
    }

    /// Of parts with 4 dimensions, packed to so many bits; nil where they do not fit each other.
    init?(stored parts: [MLXArray], bits: Int?) {
        guard let bits else {
            self.init(parts: parts, packing: nil)
            return
        }
        guard parts.count == 3, parts[0].dtype == .uint32, parts[1].dim(3) > 0,
            parts[1].shape == parts[2].shape, parts[1].dtype == parts[2].dtype
        else { return nil }
        let size = parts[0].dim(3) * 32 / bits
        let groupSize = size / parts[1].dim(3)
        guard [32, 64, 128].contains(groupSize), groupSize * parts[1].dim(3) == size,
            size * bits == parts[0].dim(3) * 32
        else { return nil }
        self.init(parts: parts, packing: Packing(bits: bits, groupSize: groupSize))
    }

    var capacity: Int { parts[0].dim(2) }

    /// The first rows, as they are stored.
    func first(_ length: Int) -> Column { with { $0[0..., 0..., ..<length] } }

    /// All rows as an array.
    var dense: MLXArray {
        guard let packing else { return parts[0] }
        // Contiguous: MLX has dequantised views of a larger buffer wrongly on some GPUs.
        let whole = parts.map { contiguous($0) }
        return dequantized(
            whole[0], scales: whole[1], biases: whole[2], groupSize: packing.groupSize,
            bits: packing.bits)
    }

    /// What rows must look like to be stored here.
    var layout: RowLayout {
        packing.map { RowLayout(parts[1], size: parts[1].dim(3) * $0.groupSize) }
            ?? RowLayout(parts[0])
    }

    /// The first `used` rows, `rows` behind them, and room for so many more: in new memory.
    func grown(used: Int, _ rows: MLXArray, room: Int) -> Column {
        let new = Column(rows, packing).parts
        return Column(
            parts: zip(parts, new).map { part, rows in
                let space = MLXArray.zeros(
                    Array(rows.shape.prefix(2)) + [room, rows.dim(3)], dtype: rows.dtype)
                return concatenated(
                    [part[0..., 0..., ..<used], rows, space].filter { $0.dim(2) > 0 }, axis: 2)
            }, packing: packing)
    }

    /// The same with `rows` [B, H, n, D], packed where these are, at `slots` [B, H, n].
    func put(_ rows: MLXArray, at slots: MLXArray) -> Column {
        let new = Column(rows, packing).parts
        return Column(
            parts: zip(parts, new).map { MLXH2OLM.put($1, at: slots, of: $0) }, packing: packing)
    }

    /// The same with another of each part.
    func with(_ change: (MLXArray) -> MLXArray) -> Column {
        Column(parts: parts.map(change), packing: packing)
    }
}

/// What rows of one kind have in common: everything but their number.
struct RowLayout: Equatable, CustomStringConvertible {
    let batch: Int
    let heads: Int
    let size: Int
    let dtype: DType

    init(_ rows: MLXArray, size: Int? = nil) {
        batch = rows.dim(0)
        heads = rows.dim(1)
        dtype = rows.dtype
        self.size = size ?? rows.dim(3)
    }

    var description: String { "\(dtype) with B = \(batch), H = \(heads), row size \(size)" }
}
