import Foundation

// Rows that are folded, as docs/policies.md says of `h2o`.

extension ReferenceCache {
    /// Of the rows that are `gone` the nearer half becomes part of the nearest ones that stay and are
    /// neither sinks nor recent nor kept for their diversity; rows without a rank, -infinity, of none.
    mutating func fold(_ head: Int, _ gone: Set<Int>, ranks: [Double], recentStart: Int) {
        let rows = heads[head]
        let places = Self.features(rows)
        let stay = open(rows, recentStart).filter {
            !gone.contains($0) && ranks[$0] > -.infinity && ranks[$0] <= 1
        }
        guard !stay.isEmpty else { return }
        let pairs = gone.sorted().filter { ranks[$0] > -.infinity }.map { row in
            let apart = stay.map { other in
                zip(places[row], places[other]).reduce(0) { $0 + ($1.0 - $1.1) * ($1.0 - $1.1) }
            }
            let nearest = apart.indices.min { apart[$0] < apart[$1] } ?? 0
            return (row: row, into: stay[nearest], apart: apart[nearest])
        }
        var members: [Int: [Int]] = [:]
        for pair in pairs.sorted(by: { $0.apart < $1.apart }).prefix((gone.count + 1) / 2) {
            members[pair.into, default: []].append(pair.row)
        }
        for (end, others) in members {
            let group = [end] + others
            let weights = group.map { max(ranks[$0], 1e-9) }
            let total = weights.reduce(0, +)
            func mean(_ part: (Row) -> [Double]) -> [Double] {
                part(rows[end]).indices.map { column in
                    zip(group, weights).reduce(0) { $0 + $1.1 / total * part(rows[$1.0])[column] }
                }
            }
            (heads[head][end].key, heads[head][end].value) = pack(mean(\.key), mean(\.value))
            heads[head][end].count = group.reduce(0) { $0 + rows[$1].count }
            heads[head][end].importance = group.reduce(0) { $0 + (rows[$1].importance ?? 0) }
        }
    }

    /// Take over what a cache stores, [head][slot][column], which packs a mean of rows that is a
    /// rounding away from the one here to another code at times: by how many codes the worst row is
    /// off, 0 for one that nothing was folded into. `positions` are those of the slots.
    mutating func follow(
        keys: [[[Double]]], values: [[[Double]]], positions: [[Int]],
        bits: (keys: Int, values: Int)
    ) -> Double {
        var worst = 0.0
        for head in heads.indices {
            let slots = positions[head].indices.sorted { positions[head][$0] < positions[head][$1] }
            for (place, slot) in slots.enumerated() {
                let row = heads[head][place]
                for (found, expected, bits) in [
                    (keys[head][slot], row.key, bits.keys),
                    (values[head][slot], row.value, bits.values),
                ] {
                    let step =
                        ((expected.max() ?? 0) - (expected.min() ?? 0)) / Double((1 << bits) - 1)
                    let apart = zip(found, expected).map { abs($0 - $1) }.max() ?? 0
                    worst = max(worst, row.count == 1 && apart > 0 ? .infinity : apart / step)
                }
                (heads[head][place].key, heads[head][place].value) = (
                    keys[head][slot], values[head][slot]
                )
            }
        }
        return worst
    }

    /// The rows that no range protects.
    func open(_ rows: [Row], _ recentStart: Int) -> [Int] {
        rows.indices.filter {
            rows[$0].position >= sinkSize && rows[$0].position < recentStart
        }
    }

    private static func features(_ rows: [Row]) -> [[Double]] {
        func square(_ vector: [Double]) -> Double { dot(vector, vector) }
        let count = Double(rows.count)
        let ofKeys =
            sqrt(rows.reduce(0) { $0 + square($1.key) } / count) / Double(rows[0].key.count)
        let ofValues = 1 / sqrt(rows.reduce(0) { $0 + square($1.value) } / count)
        return rows.map { $0.key.map { $0 * ofKeys } + $0.value.map { $0 * ofValues } }
    }
}
