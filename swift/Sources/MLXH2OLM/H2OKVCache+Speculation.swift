import MLX
import MLXH2O

// Speculation: the newest rows may be taken back, so they are not evicted, and the scores of their
// queries wait beside the rows until they are certain.

extension H2OKVCache {
    /// How many of the newest tokens ``trim(_:)`` takes back without a trace.
    var reach: Int { configuration.speculative == 0 ? 0 : configuration.speculative + 1 }

    /// Accumulate the scores of the last update's queries.
    func takeIn(
        _ scores: MLXArray, lse: MLXArray?, isMasked: Bool, _ table: inout RowTable
    ) throws {
        guard policy.needsScores else { return }
        let length = scores.dim(2)
        let seen = policy.seen(scores, lse: lse)
        let last = min(reach, length)
        if last < length {
            let rows = table.length - last
            let certain = last == 0 ? seen : seen[0..., 0..., ..<(length - last), ..<rows]
            try table.accumulate(upTo: rows) {
                try policy.folded($0, $1, seen: certain, isMasked: isMasked)
            }
        }
        wait(for: seen, last, &table)
    }

    /// The same for a chunk whose attention returned no scores.
    func takeIn(
        chunk queries: MLXArray, keys: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode, _ table: inout RowTable
    ) throws {
        guard policy.needsScores else { return }
        let length = queries.dim(2)
        let last = min(reach, length)
        if last < length {
            let rows = table.length - last
            let mask = last == 0 ? mask : part(of: mask, 0..<length - last, of: length, rows: rows)
            let bias = table.bias?.rows(upTo: rows)
            try table.accumulate(upTo: rows) {
                try policy.folded(
                    $0, $1, chunk: queries.rows(upTo: length - last), keys: keys.rows(upTo: rows),
                    scale: scale, mask: mask, bias: bias)
            }
        }
        guard last > 0 else { return }
        let scores = try lastScores(
            queries, keys, scale: scale, mask: mask, bias: table.bias, count: last)
        wait(for: policy.seen(scores, lse: nil), last, &table)
    }

    /// Keep the scores of the last queries waiting.
    private func wait(for seen: MLXArray, _ last: Int, _ table: inout RowTable) {
        guard last > 0 else { return }
        table.waiting.append(
            Waiting(
                start: offset - last, byQuery: seen[0..., 0..., (seen.dim(2) - last)...],
                heads: table.positions.dim(1), unseen: policy.unseen))
    }

    /// Accumulate the scores of queries before the position `border`, which are now certain.
    func settle(before border: Int, in table: inout RowTable) throws {
        for one in table.waiting where one.start < border {
            // The rows that existed at the last of these queries.
            let rows = table.length - (offset - min(border, one.end))
            let certain = one.part(0..<min(one.count, border - one.start)).byQuery
            try table.accumulate(upTo: rows) {
                try policy.folded($0, $1, seen: certain[.ellipsis, ..<rows], isMasked: true)
            }
        }
        table.keepWaiting(border..<Int.max)
    }
}
