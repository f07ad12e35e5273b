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
        guard ["h2o-sum", "value-aware", "mix", "tova", "snapkv"].contains(name) else {
            return before
        }
        let weights = logits.map { $0.map(Self.softmax) }
        let means = weights.map { heads in
            before.indices.map { row in heads.reduce(0) { $0 + $1[row] } / Double(heads.count) }
        }
        switch name {
        case "tova":
            return means[means.count - 1]
        case "snapkv" where means.count >= 32:
            let votes = before.indices.map { row in means.suffix(32).reduce(0) { $0 + $1[row] } }
            return before.indices.map { row in
                votes[max(0, row - 3)...min(votes.count - 1, row + 3)].max().map { $0 / 32 }
            }
        case "snapkv":
            return averaged(before, means.map { [$0] }, decay: 31.0 / 32)
        default:
            return before.indices.map { row in
                weights.joined().reduce(before[row] ?? 0) { $0 + $1[row] }
            }
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
        case "random": rows.map { Self.hash(head: head, position: $0.position) }
        case "keydiff": Self.diversity(rows)
        case "value-aware":
            rows.map { row in
                row.importance.map { $0 * row.value.reduce(0) { $0 + abs($1) } } ?? -.infinity
            }
        case "mix": mixed(rows)
        default: rows.map { $0.importance ?? -.infinity }
        }
    }

    private func mixed(_ rows: [Row]) -> [Double] {
        let diversity = Self.places(Self.diversity(rows))
        let mass = Self.places(rows.map { $0.importance ?? -.infinity })
        return rows.indices.map {
            rows[$0].importance == nil ? -.infinity : Double(4 * diversity[$0] + mass[$0])
        }
    }

    /// 0 to N - 1; of equals the later is the lesser.
    private static func places(_ values: [Double]) -> [Int] {
        let order = values.indices.sorted { (values[$0], -$0) < (values[$1], -$1) }
        var places = [Int](repeating: 0, count: values.count)
        for (place, row) in order.enumerated() { places[row] = place }
        return places
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

    /// Seed 0: the upper 24 bits of three rounds of MurmurHash3's finaliser.
    private static func hash(head: Int, position: Int) -> Double {
        func round(_ bits: UInt32) -> UInt32 {
            var bits = bits &+ 0x9E37_79B9
            bits = (bits ^ (bits >> 16)) &* 0x85EB_CA6B
            bits = (bits ^ (bits >> 13)) &* 0xC2B2_AE35
            return bits ^ (bits >> 16)
        }
        let bits = round(round(round(0) ^ UInt32(head)) ^ UInt32(position))
        return Double(bits >> 8)
    }
}
