import MLX

/// What packed rows of a head are kept relative to: keys as `R (key - centre)`, values as `R value`.
///
/// R is the orthonormal Hadamard matrix, over blocks of the largest power of two that divides the
/// size of a kept row: its own inverse. A row that 32 does not divide is kept with zeros behind it.
/// The centre, [B, H, 1, D], is the mean of the first keys, at most 64; a frame never changes.
/// Attention is the same in any frame: queries are rotated as keys are, the centre shifts all logits
/// of a query alike, and the output is rotated back once.
struct Frame {
    let centre: MLXArray
    let valueSize: Int

    private static let group = 32
    private static let firstRows = 64

    init(centre: MLXArray, valueSize: Int) {
        self.centre = centre
        self.valueSize = valueSize
    }

    /// That of keys [B, H, L, D] and values, and of those to come.
    init(of keys: MLXArray, _ values: MLXArray) {
        let first = keys.rows(upTo: min(keys.dim(2), Self.firstRows)).asType(.float32)
        // Rounded to 8 bits, so that it does not depend on the order of a sum.
        let mean = first.mean(axis: 2, keepDims: true).asType(.bfloat16)
        self.init(centre: mean.asType(keys.dtype), valueSize: values.dim(3))
    }

    /// Elements of a kept row, of those that have so many; of any number that a file may name.
    static func keptSize(_ size: Int) -> Int { (size &+ (group - 1)) / group * group }

    /// Rows as they are kept.
    func into(_ keys: MLXArray, _ values: MLXArray) -> (keys: MLXArray, values: MLXArray) {
        (Self.rotated(keys - centre), Self.rotated(values))
    }

    /// Kept keys as they came.
    func keysBack(_ keys: MLXArray) -> MLXArray {
        Self.rotatedBack(keys, size: centre.dim(3)) + centre
    }

    /// Kept values as they came, or what attention made of them, [B, Hq, L, ...].
    func valuesBack(_ values: MLXArray) -> MLXArray {
        Self.rotatedBack(values, size: valueSize)
    }

    /// Queries [B, Hq, L, D] as kept keys are multiplied by them.
    func query(_ queries: MLXArray) -> MLXArray { Self.rotated(queries) }

    /// float32 [B, Hq, L, 1]: what the logits of kept keys lack of those of the true keys.
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
