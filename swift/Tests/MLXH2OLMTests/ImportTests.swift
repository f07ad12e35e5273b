import MLX
import MLXLMCommon
import Testing

// As in the source of a model: the one line that makes it evict.
import func MLXH2OLM.attentionWithCacheUpdate

@Suite struct ImportTests {
    /// The scoped import wins over the function of the same name in MLXLMCommon.
    @Test func oneImportRoutesAModel() throws {
        let tokens = Tokens(count: 20, seed: 1)
        let cache = try filled(0, small(), tokens)
        for token in 0..<20 {
            let (queries, keys, values) = tokens.slice(token..<token + 1)
            try withError {
                eval(
                    attentionWithCacheUpdate(
                        queries: queries, keys: keys, values: values, cache: cache, scale: 1))
            }
        }
        #expect(cache.evicted == 12)
    }
}
