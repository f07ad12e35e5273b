import Foundation

/// What each policy makes of logits, and how it ranks rows: one head at a time, in double
/// precision, written from docs/policies.md and sharing no code with the package.
struct ReferencePolicy {
    typealias Row = ReferenceCache.Row

    let name: String
    let decay: Double

    /// The new importance of each row, from logits [query][query head][row], nil where masked.
    func accumulate(_ before: [Double?], _ logits: [[[Double?]]]) -> [Double?] {
        if name == "h2o" { return averaged(before, logits, decay: decay) }
        guard name == "h2o-sum" else { return before }
        let weights = logits.map { $0.map(Self.softmax) }
        return before.indices.map { row in
            weights.joined().reduce(before[row] ?? 0) { $0 + $1[row] }
        }
    }

    /// C = a*C + (1-a)*|s| for each query in order; the first sets C.
    private func averaged(
        _ before: [Double?], _ given: [[[Double?]]], decay: Double
    ) -> [Double?] {
        var result = before
        for heads in given {
            for row in before.indices {
                let seen = heads.compactMap { $0[row] }
                guard !seen.isEmpty else { continue }
                let new = abs(seen.reduce(0, +) / Double(seen.count))
                result[row] = result[row].map { decay * $0 + (1 - decay) * new } ?? new
            }
        }
        return result
    }

    private static func softmax(_ logits: [Double?]) -> [Double] {
        let peak = logits.compactMap { $0 }.max() ?? 0
        let parts = logits.map { $0.map { exp($0 - peak) } ?? 0 }
        let total = parts.reduce(0, +)
        return parts.map { $0 / total }
    }

    /// Of the rows of a head, in order of position; higher is kept.
    func ranks(_ rows: [Row], head: Int) -> [Double] {
        switch name {
        case "window": rows.map { Double($0.position) }
        case "keydiff": Self.diversity(rows)
        default: rows.map { $0.importance ?? -.infinity }
        }
    }

    /// Minus the cosine of each key with the mean of the normalised keys.
    private static func diversity(_ rows: [Row]) -> [Double] {
        func length(_ vector: [Double]) -> Double { sqrt(dot(vector, vector)) }
        let lengths = rows.map { length($0.key) }
        var mean = [Double](repeating: 0, count: rows[0].key.count)
        for (row, length) in zip(rows, lengths) {
            add(1 / length / Double(rows.count), row.key, to: &mean)
        }
        let norm = length(mean)
        return zip(rows, lengths).map { row, length in -dot(row.key, mean) / length / norm }
    }
}
