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

/// The same without scores, which only dense rows without lse allow.
func runWithoutScores(_ parity: Case) throws -> [String: MLXArray] {
    guard parity.fields.bits == nil, parity.fields.returnLse != true else {
        var found = try parity.fields.bits == nil ? runAttention(parity) : runQuantized(parity)
        found["scores"] = nil
        return found
    }
    let out = try MLXFast.attention(
        1, parity.tensor("queries"), [parity.rows("keys")], [parity.rows("values")], nil,
        parity.field(\.scale, "scale"), parity.mask(), sinks: parity.optionalTensor("sinks"),
        rowBias: parity.optionalTensor("row_bias"))[0]
    return ["out": out.asType(.float32)]
}

/// The rows to keep.
func runKeep(_ parity: Case) throws -> [String: MLXArray] {
    [
        "keep": try keepIndices(
            parity.tensor("scores"), positions: parity.tensor("positions"),
            keep: parity.field(\.keep, "keep"), sinkSize: parity.fields.sinkSize ?? 0,
            recentStart: parity.recentStart())
    ]
}
