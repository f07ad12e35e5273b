import MLX

/// Random queries, keys and values of a made-up layer, as arrays and as lists of doubles.
struct Tokens {
    let queryHeads: Int
    let heads: Int
    let size: Int
    private let arrays: [MLXArray]
    private let lists: [[[[Double]]]]

    init(count: Int, queryHeads: Int = 4, heads: Int = 2, size: Int = 32, seed: UInt64) {
        self.queryHeads = queryHeads
        self.heads = heads
        self.size = size
        arrays = [queryHeads, heads, heads].enumerated().map { index, heads in
            MLXRandom.normal(
                [1, heads, count, size], dtype: .float32,
                key: MLXRandom.key(3 * seed + UInt64(index)))
        }
        lists = arrays.map(Self.lists)
    }

    /// The same with keys and values as they are after packing.
    func rounded(bits: Int, valueBits: Int, groupSize: Int) -> Tokens {
        let (keys, values) = (arrays[1], arrays[2])
        let rounded = [(keys, bits), (values, valueBits)].map { rows, bits in
            Self.rounded(rows, bits: bits, groupSize: groupSize)
        }
        return Tokens(self, arrays: [arrays[0]] + rounded)
    }

    /// One row as it is after packing.
    static func rounded(_ row: [Double], bits: Int, groupSize: Int) -> [Double] {
        let rows = MLXArray(row.map { Float($0) }, [1, row.count])
        return rounded(rows, bits: bits, groupSize: groupSize).asArray(Float.self).map {
            Double($0)
        }
    }

    private static func rounded(_ rows: MLXArray, bits: Int, groupSize: Int) -> MLXArray {
        let (words, scales, biases) = quantized(rows, groupSize: groupSize, bits: bits)
        return dequantized(words, scales: scales, biases: biases, groupSize: groupSize, bits: bits)
    }

    private init(_ other: Tokens, arrays: [MLXArray]) {
        queryHeads = other.queryHeads
        heads = other.heads
        size = other.size
        self.arrays = arrays
        lists = arrays.map(Self.lists)
    }

    /// Of the first sequence of an array [B, H, L, D], as [head][token][column].
    static func lists(of array: MLXArray) -> [[[Double]]] {
        let (heads, count, size) = (array.dim(1), array.dim(2), array.dim(3))
        let values = array.asArray(Float.self).map { Double($0) }
        return (0..<heads).map { head in
            (0..<count).map { token in
                let start = (head * count + token) * size
                return Array(values[start..<start + size])
            }
        }
    }

    /// queries, keys, values of some tokens, [1, H, L, D].
    func slice(_ range: Range<Int>) -> (queries: MLXArray, keys: MLXArray, values: MLXArray) {
        let part = arrays.map { $0[0..., 0..., range] }
        return (part[0], part[1], part[2])
    }

    /// The same, as [head][token][column].
    func lists(
        _ range: Range<Int>
    ) -> (queries: [[[Double]]], keys: [[[Double]]], values: [[[Double]]]) {
        let part = lists.map { $0.map { Array($0[range]) } }
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

// Over pointers: tests are built without optimisation, where each element of a sequence costs calls.

func dot(_ one: [Double], _ other: [Double]) -> Double {
    one.withUnsafeBufferPointer { one in
        other.withUnsafeBufferPointer { other in
            var (sum, column) = (0.0, 0)
            while column < one.count {
                sum += one[column] * other[column]
                column += 1
            }
            return sum
        }
    }
}

/// result += factor * row
func add(_ factor: Double, _ row: [Double], to result: inout [Double]) {
    row.withUnsafeBufferPointer { row in
        result.withUnsafeMutableBufferPointer { result in
            var column = 0
            while column < result.count {
                result[column] += factor * row[column]
                column += 1
            }
        }
    }
}
