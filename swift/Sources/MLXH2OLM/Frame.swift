import MLX

/// The frame of a head's packed rows: keys are stored as `R (key - centre)`, values as `R value`.
///
/// R is the orthonormal Hadamard matrix, over blocks of the largest power of two that divides the
/// stored size; it is its own inverse. Sizes that are not multiples of 32 are padded with zeros.
/// The centre, [B, H, 1, D], is the mean of the first keys, at most 64; a frame never changes.
/// Attention does not depend on the frame: queries are rotated like keys, the centre shifts all
/// logits of a query equally, and the output is rotated back once.
struct Frame {
    let centre: MLXArray
    let valueSize: Int

    private static let group = 32
    private static let firstRows = 64
}

extension Frame {
    /// The frame of keys [B, H, L, D] and values, and of later rows.
    init(of keys: MLXArray, _ values: MLXArray) {
        let first = keys.rows(upTo: min(keys.dim(2), Self.firstRows)).asType(.float32)
        // Rounded to bfloat16, so that it does not depend on the order of the sum.
        let mean = first.mean(axis: 2, keepDims: true).asType(.bfloat16)
        self.init(centre: mean.asType(keys.dtype), valueSize: values.dim(3))
    }

    /// The padded size of rows of this size; never overflows, as a file can name any number.
    static func keptSize(_ size: Int) -> Int { (size &+ (group - 1)) / group * group }

    /// Rows as stored.
    func into(_ keys: MLXArray, _ values: MLXArray) -> (keys: MLXArray, values: MLXArray) {
        (Self.rotated(keys - centre), Self.rotated(values))
    }

    /// Stored keys back to the original keys.
    func keysBack(_ keys: MLXArray) -> MLXArray {
        Self.rotatedBack(keys, size: centre.dim(3)) + centre
    }

    /// Stored values, or the attention output over them, [B, Hq, L, ...], rotated back.
    func valuesBack(_ values: MLXArray) -> MLXArray {
        Self.rotatedBack(values, size: valueSize)
    }

    /// Queries [B, Hq, L, D], rotated for products with stored keys.
    func query(_ queries: MLXArray) -> MLXArray { Self.rotated(queries) }

    /// float32 [B, Hq, L, 1]: the difference between logits of the original and of the stored keys.
    func shift(_ queries: MLXArray, scale: Float) -> MLXArray {
        let (batch, heads, length, size) = (
            queries.dim(0), queries.dim(1), queries.dim(2), queries.dim(3)
        )
        let grouped = queries.asType(.float32).reshaped(batch, centre.dim(1), -1, size)
        let products = matmul(grouped, centre.asType(.float32).swappedAxes(2, 3)) * scale
        return products.reshaped(batch, heads, length, 1)
    }

    private static func rotated(_ rows: MLXArray) -> MLXArray {
        let missing = keptSize(rows.dim(-1)) - rows.dim(-1)
        guard missing > 0 else { return turned(rows) }
        let zeros = MLXArray.zeros(rows.shape.dropLast() + [missing], dtype: rows.dtype)
        return turned(concatenated([rows, zeros], axis: -1))
    }

    private static func rotatedBack(_ rows: MLXArray, size: Int) -> MLXArray {
        let whole = turned(rows)
        return whole.dim(-1) == size ? whole : whole[.ellipsis, ..<size]
    }

    private static func turned(_ rows: MLXArray) -> MLXArray {
        let size = rows.dim(-1)
        let block = size & -size
        guard block < size else { return hadamardTransform(rows) }
        let blocks = rows.reshaped(rows.shape.dropLast() + [size / block, block])
        return hadamardTransform(blocks).reshaped(rows.shape)
    }
}
