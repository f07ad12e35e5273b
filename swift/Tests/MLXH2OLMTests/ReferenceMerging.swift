import Foundation

// Rows that merge, as docs/policies.md says of `merge`: pairs of rows, one after the other. The
// rows of a head are in the order of their slots, which says what may merge with what.

extension ReferenceCache {
    /// A quarter of the free rows at a time, until `size` rows are left.
    mutating func merge(to size: Int, recentStart: Int) {
        while heads[0].count > size {
            let free = heads[0].count - sinkSize - max(0, offset - recentStart)
            merge(
                min(heads[0].count - size, max(1, free / 4)),
                recentStart: recentStart)
        }
    }

    /// Take over what a cache stores, [head][slot][column], which packs a mean of rows that is a
    /// rounding away from the one here to another code at times: by how many codes the worst row is
    /// off, 0 for one that nothing merged into.
    mutating func follow(
        keys: [[[Double]]], values: [[[Double]]], bits: (keys: Int, values: Int)
    ) -> Double {
        var worst = 0.0
        for head in heads.indices {
            for slot in heads[head].indices {
                let row = heads[head][slot]
                for (found, expected, bits) in [
                    (keys[head][slot], row.key, bits.keys),
                    (values[head][slot], row.value, bits.values),
                ] {
                    let step =
                        ((expected.max() ?? 0) - (expected.min() ?? 0)) / Double((1 << bits) - 1)
                    let apart = zip(found, expected).map { abs($0 - $1) }.max() ?? 0
                    worst = max(worst, row.count == 1 && apart > 0 ? .infinity : apart / step)
                }
                (heads[head][slot].key, heads[head][slot].value) = (
                    keys[head][slot], values[head][slot]
                )
            }
        }
        return worst
    }

    private mutating func merge(_ count: Int, recentStart: Int) {
        let all = heads.map { masses($0, recentStart) }
        var costs = zip(heads, all).map { rows, masses in
            let free = open(rows, recentStart).filter { !leaves(rows[$0], recentStart) }
            return Self.costs(rows, masses, free: free)
        }
        if sharedHeads {
            let sums = costs[0].indices.map { row in
                costs[0].indices.map { other in costs.reduce(0) { $0 + $1[row][other] } }
            }
            costs = heads.map { _ in sums }
        }
        for head in heads.indices {
            let (rows, costs) = (heads[head], costs[head])
            let partners = costs.map { row in row.indices.min { row[$0] < row[$1] } ?? 0 }
            let best = rows.indices.map { costs[$0][partners[$0]] }
            let order = rows.indices.map { leaves(rows[$0], recentStart) ? -.infinity : best[$0] }
            let worst = open(rows, recentStart).sorted {
                (order[$0], -rows[$0].position) < (order[$1], -rows[$1].position)
            }
            let going = worst.prefix(count).sorted()
            let into = going.map { row in
                var end = row
                while going.contains(end), best[end] < .infinity { end = partners[end] }
                return end
            }
            heads[head] = filled(join(rows, all[head], going, into), going)
        }
    }

    private func open(_ rows: [Row], _ recentStart: Int) -> [Int] {
        rows.indices.filter {
            rows[$0].position >= sinkSize && rows[$0].position < recentStart
        }
    }

    /// Rows become part of the ones that they go into, if those stay.
    private func join(_ rows: [Row], _ masses: [Double], _ going: [Int], _ into: [Int]) -> [Row] {
        var result = rows
        for end in Set(into).subtracting(going) {
            let group = [end] + zip(going, into).filter { $1 == end }.map(\.0)
            let total = group.reduce(0) { $0 + masses[$1] }
            func mean(_ part: (Row) -> [Double]) -> [Double] {
                part(rows[end]).indices.map { column in
                    group.reduce(0) { $0 + masses[$1] / total * part(rows[$1])[column] }
                }
            }
            (result[end].key, result[end].value) = pack(mean(\.key), mean(\.value))
            result[end].count = group.reduce(0) { $0 + rows[$1].count }
            result[end].position = group.map { rows[$0].position }.min() ?? 0
        }
        return result
    }

    /// The last rows fill the slots that fall free, the last one the first.
    private func filled(_ rows: [Row], _ going: [Int]) -> [Row] {
        let kept = rows.count - going.count
        var result = rows
        var moving = (kept..<rows.count).filter { !going.contains($0) }
        for slot in going where slot < kept { result[slot] = rows[moving.removeLast()] }
        return Array(result[..<kept])
    }

    /// Rows that leave count once.
    private func masses(_ rows: [Row], _ recentStart: Int) -> [Double] {
        func length(_ vector: [Double]) -> Double {
            max(sqrt(vector.reduce(0) { $0 + $1 * $1 }), 1e-12)
        }
        let directions = rows.map { row in row.key.map { $0 / length(row.key) } }
        var mean = [Double](repeating: 0, count: rows[0].key.count)
        let counts = rows.map { leaves($0, recentStart) ? 1 : Double($0.count) }
        for (count, direction) in zip(counts, directions) {
            for place in mean.indices { mean[place] += sqrt(count) * direction[place] }
        }
        return zip(counts, directions).map { count, direction in
            let product = zip(direction, mean).reduce(0) { $0 + $1.0 * $1.1 }
            return count * exp(-3 * product / length(mean))
        }
    }

    /// Of each row with one in a later slot; infinity where none may merge.
    private static func costs(_ rows: [Row], _ masses: [Double], free: [Int]) -> [[Double]] {
        func square(_ vector: [Double]) -> Double { vector.reduce(0) { $0 + $1 * $1 } }
        let count = Double(rows.count)
        let ofKeys =
            sqrt(rows.reduce(0) { $0 + square($1.key) } / count) / Double(rows[0].key.count)
        let ofValues = 1 / sqrt(rows.reduce(0) { $0 + square($1.value) } / count)
        let places = rows.map { $0.key.map { $0 * ofKeys } + $0.value.map { $0 * ofValues } }
        var costs = rows.map { _ in [Double](repeating: .infinity, count: rows.count) }
        for row in free {
            for other in free where other > row {
                let mass = masses[row] * masses[other] / (masses[row] + masses[other])
                costs[row][other] =
                    sqrt(mass) * square(zip(places[row], places[other]).map { $0 - $1 })
            }
        }
        return costs
    }
}
