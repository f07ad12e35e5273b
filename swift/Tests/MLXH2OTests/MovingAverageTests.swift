import MLX
import MLXH2O
import Testing

/// `C = a*C + (1-a)*|s|` against the definition, one query and one row at a time.
@Suite struct MovingAverageTests {
    private let decay = 0.75

    /// The definition: `before` per row (nil: not yet scored), `scores` as [query head][query][row].
    private func expected(_ before: [Double?], _ scores: [[[Double]]]) -> [Double?] {
        before.indices.map { row in
            scores[0].indices.reduce(before[row]) { importance, query in
                let seen = scores.map { $0[query][row] }.filter { $0 > -.infinity }
                guard !seen.isEmpty else { return importance }
                let new = abs(seen.reduce(0, +) / Double(seen.count))
                return importance.map { decay * $0 + (1 - decay) * new } ?? new
            }
        }
    }

    private func check(_ before: [Double?], _ scores: [[[Double]]], isMasked: Bool = true) throws {
        let rows = before.count
        let shape = [1, scores.count, scores[0].count, rows]
        let found = try H2OEmaPolicy(decay: decay).accumulate(
            MLXArray(before.map { Float($0 ?? .nan) }, [1, 1, rows]),
            scores: MLXArray(scores.joined().joined().map { Float($0) }, shape),
            positions: MLXArray(Int32(0)..<Int32(rows), [1, 1, rows]), isMasked: isMasked)
        #expect(found.shape == [1, 1, rows])
        for (one, other) in zip(found.asArray(Float.self), expected(before, scores)) {
            if let other {
                #expect(Swift.abs(Double(one) - other) < 1e-6)
            } else {
                #expect(one.isNaN)
            }
        }
    }

    private let none = -Double.infinity

    @Test func oneQuery() throws {
        try check([1, nil, 2, nil], [[[-3, -4, none, none]], [[1, none, none, none]]])
    }

    @Test func severalQueriesInOrder() throws {
        let first = [
            [-3, none, none, none, 1], [2, -1, none, none, none], [0.5, 4, 3, none, -2],
        ]
        let second = [
            [1, none, none, none, none], [none, 7, none, none, none], [2, 2, none, none, 1],
        ]
        try check([1, nil, 2, nil, nil], [first, second])
    }

    @Test(arguments: [1, 3]) func withoutAMask(queries: Int) throws {
        let first: [[Double]] = [[0, 3, 6], [-2, 1, 4], [-4, -1, 2]]
        let second: [[Double]] = [[1, 4, 7], [-1, 2, 5], [-3, 0, 3]]
        let scores = [Array(first.prefix(queries)), Array(second.prefix(queries))]
        try check([0.5, nil, 0], scores, isMasked: false)
    }

    /// The mean of the heads, not of their sizes: opposite logits cancel.
    @Test func theMeanComesFirst() throws {
        try check([nil], [[[2]], [[-2]]])
    }
}
