import MLX
import MLXH2O

/// out, scores and lse, as float32.
func runAttention(_ parity: Case) throws -> [String: MLXArray] {
    // The rows of the slack lie behind the views, and nothing may read them.
    let rows = try parity.tensor("keys").dim(2) - (parity.fields.slack ?? 0)
    let mask: MLXFast.ScaledDotProductAttentionMaskMode =
        switch parity.fields.mask {
        case "causal": .causal
        case "array": .array(try parity.tensor("mask"))
        default: .none
        }
    let queries = try parity.tensor("queries")
    let keys = try parity.tensor("keys")[0..., 0..., ..<rows]
    let values = try parity.tensor("values")[0..., 0..., ..<rows]
    let scale = try parity.field(\.scale, "scale")
    let sinks = parity.optionalTensor("sinks")
    guard parity.fields.returnLse == true else {
        let (out, scores) = try MLXFast.scaledDotProductAttentionWithScores(
            queries: queries, keys: keys, values: values, scale: scale, mask: mask, sinks: sinks)
        return ["out": out.asType(.float32), "scores": scores]
    }
    let result = try MLXFast.scaledDotProductAttentionWithScoresAndLse(
        queries: queries, keys: keys, values: values, scale: scale, mask: mask, sinks: sinks)
    return ["out": result.output.asType(.float32), "scores": result.scores, "lse": result.lse]
}

/// The rows to keep, and apart from that the rows to evict.
func runKeep(_ parity: Case) throws -> [String: MLXArray] {
    let scores = try parity.tensor("scores")
    let positions = try parity.tensor("positions")
    let sinkSize = parity.fields.sinkSize ?? 0
    let recentStart = parity.fields.recentStart
    return [
        "keep": try keepIndices(
            scores, positions: positions, keep: try parity.field(\.keep, "keep"),
            sinkSize: sinkSize, recentStart: recentStart),
        "evict": try evictIndices(
            scores, positions: positions, count: try parity.field(\.count, "count"),
            sinkSize: sinkSize, recentStart: recentStart),
    ]
}
