import MLX

/// Random queries, keys and values of a made-up layer, [1, H, L, D].
struct Tokens {
    private let arrays: [MLXArray]

    init(count: Int, queryHeads: Int = 4, heads: Int = 2, size: Int = 32, seed: UInt64) {
        arrays = [queryHeads, heads, heads].enumerated().map { index, heads in
            MLXRandom.normal(
                [1, heads, count, size], dtype: .float32,
                key: MLXRandom.key(3 * seed + UInt64(index)))
        }
    }

    /// queries, keys, values of some tokens, [1, H, L, D].
    func slice(_ range: Range<Int>) -> (queries: MLXArray, keys: MLXArray, values: MLXArray) {
        let part = arrays.map { $0[0..., 0..., range] }
        return (part[0], part[1], part[2])
    }
}

/// The positions of each head of the first sequence, ascending.
func sortedPositions(_ positions: MLXArray?) -> [[Int]] {
    guard let positions else { return [] }
    let (heads, rows) = (positions.dim(1), positions.dim(2))
    let values = positions.asArray(Int32.self).map { Int($0) }
    return (0..<heads).map { values[$0 * rows..<($0 + 1) * rows].sorted() }
}
