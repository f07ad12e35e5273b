import MLX
import MLXH2O

/// How packed rows are stored.
enum RowPacking: Equatable {
    /// As codes with a scale and a bias for each group.
    case affine(bits: Int, groupSize: Int)
    /// As codes of a rotated direction, and a norm; codes do not record `dtype`, that of the rows.
    case codes(bits: Int, ofValues: Bool, dtype: DType)

    var bits: Int {
        switch self {
        case .affine(let bits, _): bits
        case .codes(let bits, _, _): bits
        }
    }

    var groupSize: Int? { if case .affine(_, let size) = self { size } else { nil } }
}

/// Stored keys or values of one layer: an array; words, scales and biases; or words and norms.
struct Column {
    /// Each [B, H, capacity, ...].
    let parts: [MLXArray]
    /// Nil: rows are unpacked.
    let packing: RowPacking?
}

extension Column: CacheRows {
    /// As operations return rows, which do not record their packing.
    static func rows(of parts: [MLXArray]) -> Column { Column(parts: parts, packing: nil) }

    /// Stores rows [B, H, N, D].
    init(_ rows: MLXArray, _ packing: RowPacking?) throws {
        switch packing {
        case nil:
            self.init(parts: [rows], packing: nil)
        case .affine(let bits, let groupSize):
            let (words, scales, biases) = quantized(rows, groupSize: groupSize, bits: bits)
            self.init(parts: [words, scales] + (biases.map { [$0] } ?? []), packing: packing)
        case .codes(let bits, let ofValues, _):
            self.init(
                parts: try encodeRows(rows, bits: bits, ofValues: ofValues).parts, packing: packing)
        }
    }

    /// From parts with 4 dimensions, packed to `bits` bits, of rows in `dtype`; nil if they do not
    /// fit each other.
    init?(stored parts: [MLXArray], bits: Int, ofValues: Bool, dtype: DType?) {
        if parts.count == 1 {
            guard parts[0].dtype.isFloatingPoint else { return nil }
            self.init(parts: parts, packing: nil)
            return
        }
        let size = parts[0].dim(3) * 32 / bits
        guard parts[0].dtype == .uint32, size * bits == parts[0].dim(3) * 32 else { return nil }
        if parts.count == 2 {
            let (norms, own) = (parts[1], dtype ?? .float32)
            guard hasCodes(size), norms.dtype == .float32, norms.dim(3) == 1 else { return nil }
            self.init(parts: parts, packing: .codes(bits: bits, ofValues: ofValues, dtype: own))
            return
        }
        guard let groupSize = [32, 64, 128].first(where: { $0 * parts[1].dim(3) == size }),
            parts[1].shape == parts[2].shape, parts[1].dtype == parts[2].dtype
        else { return nil }
        self.init(parts: parts, packing: .affine(bits: bits, groupSize: groupSize))
    }

    var capacity: Int { parts[0].dim(2) }

    /// All rows as an array.
    func dense() throws -> MLXArray {
        switch packing {
        case nil: return parts[0]
        case .affine(let bits, let groupSize):
            // Contiguous: on some GPUs MLX dequantised views of a larger buffer wrongly.
            let whole = parts.map { contiguous($0) }
            // On a CPU MLX rounds 16-bit products and their sums; the operations round only once.
            let type = Device.defaultDevice().deviceType == .cpu ? .float32 : parts[1].dtype
            return dequantized(
                whole[0], scales: whole[1].asType(type), biases: whole[2].asType(type),
                groupSize: groupSize, bits: bits
            ).asType(parts[1].dtype)
        case .codes(let bits, let ofValues, let dtype):
            return try decodeRows(.rows(of: parts), bits: bits, ofValues: ofValues).asType(dtype)
        }
    }

    /// The layout that new rows must have.
    var layout: RowLayout {
        switch packing {
        case nil: RowLayout(parts[0])
        case .affine(_, let groupSize): RowLayout(parts[1], size: parts[1].dim(3) * groupSize)
        case .codes(let bits, _, let dtype):
            RowLayout(parts[0], size: parts[0].dim(3) * 32 / bits, dtype: dtype)
        }
    }

    /// The first `used` rows, then `rows`, then room for `room` more, in new memory.
    func grown(used: Int, _ rows: MLXArray, room: Int) throws -> Column {
        let new = try Column(rows, packing).parts
        return Column(
            parts: zip(parts, new).map { part, rows in
                let space = MLXArray.zeros(
                    Array(rows.shape.prefix(2)) + [room, rows.dim(3)], dtype: rows.dtype)
                return concatenated(
                    [part[0..., 0..., ..<used], rows, space].filter { $0.dim(2) > 0 }, axis: 2)
            }, packing: packing)
    }

    /// The same with `rows` [B, H, n, D], packed like the others, at `slots` [B, H, n].
    func put(_ rows: MLXArray, at slots: MLXArray) throws -> Column {
        let new = try Column(rows, packing).parts
        let each = slots.expandedDimensions(axis: -1)
        return Column(
            parts: zip(parts, new).map { putAlong($0, each, values: $1, axis: 2) },
            packing: packing)
    }

    /// The same with every part changed.
    func with(_ change: (MLXArray) -> MLXArray) -> Column {
        Column(parts: parts.map(change), packing: packing)
    }
}

/// The layout of rows: everything except their number.
struct RowLayout: Hashable, CustomStringConvertible {
    let batch: Int
    let heads: Int
    var size: Int
    let dtype: DType

    init(_ rows: MLXArray, size: Int? = nil, dtype: DType? = nil) {
        batch = rows.dim(0)
        heads = rows.dim(1)
        self.dtype = dtype ?? rows.dtype
        self.size = size ?? rows.dim(3)
    }

    var description: String { "\(dtype) with B = \(batch), H = \(heads), row size \(size)" }
}

/// Whether rows of this size can be stored as codes.
func hasCodes(_ size: Int) -> Bool {
    (32...1024).contains(size) && size.nonzeroBitCount == 1
}
