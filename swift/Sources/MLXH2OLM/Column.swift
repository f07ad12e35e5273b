import MLX
import MLXH2O

/// How rows are kept that do not stay as they come.
enum RowPacking: Equatable {
    /// In codes, and a scale and a bias for each group.
    case affine(bits: Int, groupSize: Int)
    /// In codes of a rotated direction, and a norm; the rows come in `dtype`, which codes do not say.
    case codes(bits: Int, ofValues: Bool, dtype: DType)

    var bits: Int {
        switch self {
        case .affine(let bits, _): bits
        case .codes(let bits, _, _): bits
        }
    }

    var groupSize: Int? { if case .affine(_, let size) = self { size } else { nil } }
}

/// Keys or values as they are stored, whatever they are, for an operation.
struct StoredRows: CacheRows {
    let parts: [MLXArray]

    static func rows(of parts: [MLXArray]) -> StoredRows { StoredRows(parts: parts) }
}

/// Keys or values of one layer as they are kept: an array; words, scales and biases; or words and
/// norms.
struct Column {
    /// Each [B, H, capacity, ...].
    let parts: [MLXArray]
    /// Nil: rows stay as they come.
    let packing: RowPacking?

    init(parts: [MLXArray], packing: RowPacking?) {
        self.parts = parts
        self.packing = packing
    }

    /// Of rows [B, H, N, D].
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

    /// Of parts with 4 dimensions, packed to so many bits, of rows that come in `dtype`; nil where
    /// they do not fit each other.
    init?(stored parts: [MLXArray], bits: Int, ofValues: Bool, dtype: DType) {
        if parts.count == 1 {
            guard parts[0].dtype.isFloatingPoint else { return nil }
            self.init(parts: parts, packing: nil)
            return
        }
        let size = parts[0].dim(3) * 32 / bits
        guard parts[0].dtype == .uint32, size * bits == parts[0].dim(3) * 32 else { return nil }
        if parts.count == 2 {
            guard hasCodes(size), parts[1].dtype == .float32, parts[1].dim(3) == 1 else {
                return nil
            }
            self.init(
                parts: parts, packing: .codes(bits: bits, ofValues: ofValues, dtype: dtype))
            return
        }
        guard parts[1].dim(3) > 0, parts[1].shape == parts[2].shape,
            parts[1].dtype == parts[2].dtype
        else { return nil }
        let groupSize = size / parts[1].dim(3)
        guard [32, 64, 128].contains(groupSize), groupSize * parts[1].dim(3) == size else {
            return nil
        }
        self.init(parts: parts, packing: .affine(bits: bits, groupSize: groupSize))
    }

    var capacity: Int { parts[0].dim(2) }

    /// The first rows, as they are stored.
    func first(_ length: Int) -> Column { with { $0.rows(upTo: length) } }

    /// All rows as an array.
    func dense() throws -> MLXArray {
        switch packing {
        case nil: return parts[0]
        case .affine(let bits, let groupSize):
            // Contiguous: MLX has dequantised views of a larger buffer wrongly on some GPUs.
            let whole = parts.map { contiguous($0) }
            return dequantized(
                whole[0], scales: whole[1], biases: whole[2], groupSize: groupSize, bits: bits)
        case .codes(let bits, let ofValues, let dtype):
            return try decodeRows(.rows(of: parts), bits: bits, ofValues: ofValues).asType(dtype)
        }
    }

    /// What rows must look like to be stored here.
    var layout: RowLayout {
        switch packing {
        case nil: RowLayout(parts[0])
        case .affine(_, let groupSize): RowLayout(parts[1], size: parts[1].dim(3) * groupSize)
        case .codes(let bits, _, let dtype):
            RowLayout(parts[0], size: parts[0].dim(3) * 32 / bits, dtype: dtype)
        }
    }

    /// The first `used` rows, `rows` behind them, and room for so many more: in new memory.
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

    /// The same with `rows` [B, H, n, D], packed where these are, at `slots` [B, H, n].
    func put(_ rows: MLXArray, at slots: MLXArray) throws -> Column {
        let new = try Column(rows, packing).parts
        let each = slots.expandedDimensions(axis: -1)
        return Column(
            parts: zip(parts, new).map { putAlong($0, each, values: $1, axis: 2) },
            packing: packing)
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

    init(_ rows: MLXArray, size: Int? = nil, dtype: DType? = nil) {
        batch = rows.dim(0)
        heads = rows.dim(1)
        self.dtype = dtype ?? rows.dtype
        self.size = size ?? rows.dim(3)
    }

    /// The same of rows of another size.
    func with(size: Int) -> RowLayout { RowLayout(self, size: size) }

    private init(_ other: RowLayout, size: Int) {
        (batch, heads, dtype) = (other.batch, other.heads, other.dtype)
        self.size = size
    }

    var description: String { "\(dtype) with B = \(batch), H = \(heads), row size \(size)" }
}

/// Whether rows of so many elements can be kept as codes.
func hasCodes(_ size: Int) -> Bool {
    (32...1024).contains(size) && size.nonzeroBitCount == 1
}
