import MLX

/// The frame of a head's packed rows, which are stored as `R (row - centre)`.
///
/// R is the orthonormal Hadamard matrix, over blocks of the largest power of two that divides the
/// stored size; it is its own inverse. Sizes that are not multiples of 32 are padded with zeros.
/// The keys' centre is the mean of the first ones, at most 64. Half of the attention goes to a text's
/// first value, which has no error at the centre: if it is small beside those, it is the values'
/// centre, else 0. A frame never changes, and attention does not depend on it: queries are rotated
/// like keys, the keys' centre shifts all logits of a query equally, and the output is rotated back
/// once and gets the values' centre.
struct Frame {
    /// [B, H, 1, D], in the dtype of the keys.
    let keyCentre: MLXArray
    /// [B, H, 1, Dv], in the dtype of the values.
    let valueCentre: MLXArray

    private static let group = 32
    private static let firstRows = 64
}

extension Frame {
    /// The frame of keys [B, H, L, D] and values, and of later rows.
    init(of keys: MLXArray, _ values: MLXArray) {
        let first = [keys, values].map { $0.rows(upTo: Self.firstRows).asType(.float32) }
        let norms = sqrt(square(first[1]).sum(axis: -1, keepDims: true))
        let isSmall = norms.rows(upTo: 1) .< norms.mean(axis: 2, keepDims: true) * Float(0.5)
        let (mean, sink) = (first[0].mean(axis: 2, keepDims: true), first[1].rows(upTo: 1))
        // Rounded to bfloat16, so that they do not depend on the order of a sum.
        self.init(
            keyCentre: mean.asType(.bfloat16).asType(keys.dtype),
            valueCentre: which(isSmall, sink, Float(0)).asType(.bfloat16).asType(values.dtype))
    }

    /// The frame of stored rows of these layouts; nil if it does not fit them. Earlier versions had
    /// no centre of values.
    init?(
        stored keyCentre: MLXArray, _ valueCentre: MLXArray?, valueSize: Int?,
        for layouts: [RowLayout]
    ) {
        let (values, size) = (layouts[1], valueSize ?? valueCentre?.dim(3) ?? layouts[1].size)
        guard Self.keptSize(size) == values.size else { return nil }
        let zeros = MLXArray.zeros([values.batch, values.heads, 1, size], dtype: values.dtype)
        self.init(keyCentre: keyCentre, valueCentre: valueCentre ?? zeros)
        let fits = zip([keyCentre, self.valueCentre], layouts).allSatisfy { centre, layout in
            centre.ndim == 4 && centre.dim(2) == 1
                && RowLayout(centre, size: Self.keptSize(centre.dim(3))) == layout
        }
        guard fits, self.valueCentre.dim(3) == size else { return nil }
    }

    /// The padded size of rows of this size; never overflows, as a file can name any number.
    static func keptSize(_ size: Int) -> Int { (size &+ (group - 1)) / group * group }

    /// Rows as stored.
    func into(_ keys: MLXArray, _ values: MLXArray) -> (keys: MLXArray, values: MLXArray) {
        (rotated(keys - keyCentre), rotated(values - valueCentre))
    }

    /// Stored keys back to the original keys.
    func keysBack(_ keys: MLXArray) -> MLXArray { Self.back(keys, keyCentre) }

    /// Stored values, or the attention output over them, [B, Hq, L, ...], back to the original.
    func valuesBack(_ values: MLXArray) -> MLXArray { Self.back(values, valueCentre) }

    /// float32 [B, Hq, L, 1]: the difference between logits of the original and of the stored keys.
    func shift(_ queries: MLXArray, scale: Float) -> MLXArray {
        let (batch, heads, length, size) = (
            queries.dim(0), queries.dim(1), queries.dim(2), queries.dim(3)
        )
        let grouped = queries.asType(.float32).reshaped(batch, keyCentre.dim(1), -1, size)
        let products = matmul(grouped, keyCentre.asType(.float32).swappedAxes(2, 3)) * scale
        return products.reshaped(batch, heads, length, 1)
    }

    /// Rows, or queries [B, Hq, L, D] for products with stored keys, rotated.
    func rotated(_ rows: MLXArray) -> MLXArray {
        let missing = Self.keptSize(rows.dim(-1)) - rows.dim(-1)
        guard missing > 0 else { return Self.turned(rows) }
        let zeros = MLXArray.zeros(rows.shape.dropLast() + [missing], dtype: rows.dtype)
        return Self.turned(concatenated([rows, zeros], axis: -1))
    }

    private static func back(_ rows: MLXArray, _ centre: MLXArray) -> MLXArray {
        let (whole, size) = (turned(rows), centre.dim(3))
        let found = whole.dim(3) == size ? whole : whole[.ellipsis, ..<size]
        let ofHead = found.reshaped(found.dim(0), centre.dim(1), -1, size)
        return (ofHead + centre.asType(found.dtype)).reshaped(found.shape)
    }

    private static func turned(_ rows: MLXArray) -> MLXArray {
        let size = rows.dim(-1)
        let block = size & -size
        guard block < size else { return hadamardTransform(rows) }
        let blocks = rows.reshaped(rows.shape.dropLast() + [size / block, block])
        return hadamardTransform(blocks).reshaped(rows.shape)
    }
}
