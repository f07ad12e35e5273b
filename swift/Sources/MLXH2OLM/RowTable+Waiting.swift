import MLX
import MLXH2O

/// Scores or weights from some of the newest queries, kept while these may be taken back.
struct Waiting {
    /// The position of the first of these queries.
    let start: Int
    let count: Int
    /// [B, H, rows, count * G] of H KV heads with G query heads each.
    let seen: MLXArray
    /// The value for later rows, which these queries do not see.
    let unseen: Float

    var end: Int { start + count }

    /// The same with changed rows.
    func with(_ change: (MLXArray) -> MLXArray) -> Waiting {
        Waiting(start: start, count: count, seen: change(seen), unseen: unseen)
    }

    func followed(by rows: Int) -> Waiting {
        with { $0.rows(filledTo: $0.dim(2) + rows, with: unseen) }
    }

    /// As policies take it, [B, Hq, count, rows].
    var byQuery: MLXArray {
        let shape = seen.shape
        return seen.reshaped(shape[0], shape[1], shape[2], count, -1).transposed(0, 1, 4, 3, 2)
            .reshaped(shape[0], -1, count, shape[2])
    }

    /// Only some of the queries, counted from 0.
    func part(_ queries: Range<Int>) -> Waiting {
        let group = seen.dim(3) / count
        return Waiting(
            start: start + queries.lowerBound, count: queries.count,
            seen: seen[.ellipsis, queries.lowerBound * group..<queries.upperBound * group],
            unseen: unseen)
    }
}

extension Waiting {
    /// From `seen` [B, Hq, count, rows].
    init(start: Int, byQuery seen: MLXArray, heads: Int, unseen: Float) {
        let shape = seen.shape
        let rows = seen.reshaped(shape[0], heads, -1, shape[2], shape[3])
            .transposed(0, 1, 4, 3, 2).reshaped(shape[0], heads, shape[3], -1)
        self.init(start: start, count: shape[2], seen: rows, unseen: unseen)
    }
}

extension RowTable {
    /// Keep the waiting scores of queries at these positions only: later ones were taken back, and
    /// earlier ones accumulated by the policy.
    mutating func keepWaiting(_ positions: Range<Int>) {
        waiting = waiting.compactMap { one in
            let left = positions.clamped(to: one.start..<one.end)
            if left.count == one.count { return one }
            return left.isEmpty
                ? nil : one.part(left.lowerBound - one.start..<left.upperBound - one.start)
        }
    }

    /// Set the importance of the first `rows` to what `change` makes of it and their positions.
    mutating func accumulate(
        upTo rows: Int, _ change: (MLXArray, MLXArray) throws -> MLXArray
    ) rethrows {
        let all = importance
        let new = try change(all.rows(upTo: rows), positions.rows(upTo: rows))
        isChanged = true
        importance = rows == length ? new : concatenated([new, all[0..., 0..., rows...]], axis: 2)
    }
}
