import Foundation
import MLX
import MLXH2O
import MLXH2OLM
import MLXLMCommon

/// Attention of some of the tokens through the routed function; causal, if no other mask is given.
func attend(
    _ tokens: Tokens, _ range: Range<Int>, _ cache: (any KVCache)?,
    mask: MLXFast.ScaledDotProductAttentionMaskMode? = nil
) -> MLXArray {
    let (queries, keys, values) = tokens.slice(range)
    return MLXH2OLM.attentionWithCacheUpdate(
        queries: queries, keys: keys, values: values, cache: cache, scale: 0.25,
        mask: mask ?? (range.count > 1 ? .causal : .none))
}

/// The same of rows that are given, evaluated.
func attended(
    _ queries: MLXArray, _ keys: MLXArray, _ values: MLXArray, _ cache: any KVCache,
    scale: Float = 0.25, mask: MLXFast.ScaledDotProductAttentionMaskMode? = nil
) throws -> MLXArray {
    try withError {
        let output = MLXH2OLM.attentionWithCacheUpdate(
            queries: queries, keys: keys, values: values, cache: cache, scale: scale,
            mask: mask ?? (queries.dim(2) > 1 ? .causal : .none))
        eval(output)
        return output
    }
}

/// The greatest difference of two elements.
func furthest(_ one: MLXArray, _ other: MLXArray) -> Float {
    MLX.abs(one - other).reshaped(-1).max(axis: 0).item(Float.self)
}

/// What a file holds, for files with changed contents.
func contents(of url: URL) throws -> ([String: MLXArray], [String: String]) {
    let (arrays, texts) = try loadArraysAndMetadata(url: url)
    eval(Array(arrays.values))
    return (arrays, texts)
}

/// The settings of a file with the size of padded values, which earlier versions wrote.
func settings(_ array: MLXArray?, withValueSize size: Int) -> MLXArray {
    let found = array?.asArray(Int32.self).compactMap { Unicode.Scalar(UInt32($0)) } ?? []
    let text = "{\"value_size\": \(size)," + String(String.UnicodeScalarView(found.dropFirst()))
    return MLXArray(text.unicodeScalars.map { Int32($0.value) })
}

/// A name for a file, which is not there.
func temporaryFile(_ ending: String = "safetensors") -> URL {
    FileManager.default.temporaryDirectory.appending(
        path: "mlx-h2o-\(UUID().uuidString).\(ending)")
}

/// Settings for 8 rows: 1 sink, 4 heavy, 3 recent; two leave together.
func small(_ policy: PolicyName = .h2oEma) throws -> H2OConfiguration {
    try H2OConfiguration(.init(8, sinkSize: 1, heavySize: 4, evictEvery: 2), policy: .init(policy))
}

/// A cache of these settings that has seen the first `count` tokens one at a time.
func filled(_ count: Int, _ configuration: H2OConfiguration, _ tokens: Tokens) throws -> H2OKVCache
{
    let cache = H2OKVCache(configuration, name: "layer 3")
    decode(tokens, 0..<count, cache)
    return cache
}

/// Tokens one after the other.
func decode(_ tokens: Tokens, _ range: Range<Int>, _ cache: any KVCache) {
    for token in range { eval(attend(tokens, token..<token + 1, cache)) }
}
