import Foundation

/// What each policy makes of logits, and how it ranks rows: one head at a time, in double
/// precision, written from docs/policies.md and sharing no code with the package.
struct ReferencePolicy {
    typealias Row = ReferenceCache.Row

    let name: String
    let decay: Double
    let diversity: Double

    /// The new importance of each row, from logits [query][query head][row], nil where masked.
    func accumulate(_ before: [Double?], _ logits: [[[Double?]]]) -> [Double?] {
        if name == "h2o-ema" { return averaged(before, logits, decay: decay) }
        guard name == "h2o" else { return before }
        let weights = logits.joined().map(Self.softmax)
        return before.indices.map { row in weights.reduce(before[row] ?? 0) { $0 + $1[row] } }
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

    /// Of the rows of a head, in order of position; higher is kept. `keep` stay, of which those not
    /// in `open` are protected.
    func ranks(_ rows: [Row], keep: Int, open: [Int]) -> [Double] {
        switch name {
        case "window": rows.map { Double($0.position) }
        case "keydiff": Self.diversity(rows)
        case "h2o": shared(rows, keep: keep, open: open)
        default: rows.map { $0.importance ?? -.infinity }
        }
    }

    /// Mass times the length of the value over the greatest, and 2 more for the most diverse.
    private func shared(_ rows: [Row], keep: Int, open: [Int]) -> [Double] {
        let heavy = rows.map { row in
            row.importance.map { $0 * sqrt(dot(row.value, row.value)) } ?? -.infinity
        }
        let greatest = max(heavy.max() ?? 0, 1e-9)
        var ranks = heavy.map { $0 / greatest }
        let places = max(0, keep - (rows.count - open.count))
        let apart = Self.diversity(rows)
        let best = open.sorted { (apart[$0], -$0) > (apart[$1], -$1) }
        for row in best.prefix(Int(diversity * Double(places))) { ranks[row] += 2 }
        return ranks
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
