import MLX
import MLXH2O

/// out, scores and lse, as float32.
func runAttention(_ parity: Case) throws -> [String: MLXArray] {
    let mask = try parity.mask()
    let queries = try parity.tensor("queries")
    let (keys, values) = (try parity.rows("keys"), try parity.rows("values"))
    let scale = try parity.field(\.scale, "scale")
    let sinks = parity.optionalTensor("sinks")
    let rowBias = parity.optionalTensor("row_bias")
    guard parity.fields.returnLse == true else {
        let (out, scores) = try MLXFast.scaledDotProductAttentionWithScores(
            queries: queries, keys: keys, values: values, scale: scale, mask: mask, sinks: sinks,
            rowBias: rowBias)
        return ["out": out.asType(.float32), "scores": scores]
    }
    let result = try MLXFast.scaledDotProductAttentionWithScoresAndLse(
        queries: queries, keys: keys, values: values, scale: scale, mask: mask, sinks: sinks,
        rowBias: rowBias)
    return ["out": result.output.asType(.float32), "scores": result.scores, "lse": result.lse]
}

/// The rows to keep, and apart from that the rows to evict.
func runKeep(_ parity: Case) throws -> [String: MLXArray] {
    let scores = try parity.tensor("scores")
    let positions = try parity.tensor("positions")
    let sinkSize = parity.fields.sinkSize ?? 0
    let recentStart = parity.recentStart()
    return [
        "keep": try keepIndices(
            scores, positions: positions, keep: try parity.field(\.keep, "keep"),
            sinkSize: sinkSize, recentStart: recentStart),
        "evict": try evictIndices(
            scores, positions: positions, count: try parity.field(\.count, "count"),
            sinkSize: sinkSize, recentStart: recentStart),
    ]
}
