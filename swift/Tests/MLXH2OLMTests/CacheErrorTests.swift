import MLX
import MLXH2O
import MLXH2OLM
import MLXLMCommon
import Testing

@Suite struct CacheErrorTests {
    @Test func missingScoresAreAnError() throws {
        let cache = H2OKVCache(try small(), name: "layer 3")
        let (_, keys, values) = Tokens(count: 2, seed: 1).slice(0..<1)
        _ = cache.update(keys: keys, values: values)
        let error = #expect(throws: MLXError.self) {
            try withError { cache.update(keys: keys, values: values) }
        }
        guard case .caught(let message) = error else { return }
        #expect(message.contains("[H2OKVCache] the cache of layer 3 got no scores"))
        #expect(cache.offset == 1)
        #expect(throws: H2OError.self) { try cache.append(keys: keys, values: values) }
        let keydiff = H2OKVCache(try small(.keydiff))
        for _ in 0..<3 { _ = try keydiff.append(keys: keys, values: values) }
    }

    @Test func rowsThatDoNotFitAreRefused() throws {
        func rows(_ shape: [Int], _ dtype: DType = .float32) -> MLXArray {
            MLXArray.zeros(shape, dtype: dtype)
        }
        let cache = H2OKVCache(try small(.window))
        let good = rows([1, 2, 1, 32])
        for (keys, values) in [
            (rows([1, 2, 32]), good), (good, rows([1, 2, 2, 32])),
            (rows([1, 2, 0, 32]), rows([1, 2, 0, 32])),
        ] {
            #expect(throws: H2OError.self) { try cache.append(keys: keys, values: values) }
        }
        _ = try cache.append(keys: good, values: good)
        for keys in [rows([1, 2, 1, 16]), rows([1, 2, 1, 32], .float16), rows([2, 2, 1, 32])] {
            let values = rows(Array(keys.shape.dropLast()) + [32])
            #expect(throws: H2OError.self) { try cache.append(keys: keys, values: values) }
        }
        #expect(cache.offset == 1)
    }

    @Test func scoresThatDoNotFitAreRefused() throws {
        let cache = H2OKVCache(try small())
        let one = MLXArray.zeros([1, 4, 1, 1], dtype: .float32)
        #expect(throws: H2OError.self) { try cache.accumulate(one) }
        let (_, keys, values) = Tokens(count: 1, seed: 1).slice(0..<1)
        _ = try cache.append(keys: keys, values: values)
        for shape in [[1, 4, 1, 2], [1, 3, 1, 1], [2, 4, 1, 1], [4, 1, 1], [1, 4, 0, 1]] {
            let scores = MLXArray.zeros(shape, dtype: .float32)
            #expect(throws: H2OError.self) { try cache.accumulate(scores) }
            #expect(throws: MLXError.self) { try withError { cache.updateScores(scores) } }
        }
        #expect(throws: H2OError.self) { try cache.accumulate(one.asType(.float16)) }
        try cache.accumulate(MLXArray.zeros([1, 4, 1, 1], dtype: .float32))
    }

    /// What the operation throws inside the routed function reaches `withError`.
    @Test func errorsOfAttentionAreReported() throws {
        let cache = H2OKVCache(try small())
        let (_, keys, values) = Tokens(count: 1, seed: 1).slice(0..<1)
        let queries = MLXArray.zeros([1, 4, 1, 16], dtype: .float32)
        #expect(throws: MLXError.self) {
            try withError {
                MLXH2OLM.attentionWithCacheUpdate(
                    queries: queries, keys: keys, values: values, cache: cache, scale: 1)
            }
        }
    }

    /// The step can be taken again, whether the operation threw or MLX reported the error.
    @Test func aStepThatFailsChangesNothing() throws {
        let tokens = Tokens(count: 30, seed: 1)
        for (policy, count) in [(PolicyName.h2oEma, 1), (.h2o, 3), (.keydiff, 2), (.window, 12)] {
            let cache = H2OKVCache(try small(policy))
            decode(tokens, 0..<9, cache)
            let (queries, keys, values) = tokens.slice(9..<9 + count)
            let (offset, size) = (cache.offset, cache.size)
            let mask = MLXArray.zeros([count, 99], dtype: .float32)
            for body in [
                { _ = try attended(queries[.ellipsis, ..<16], keys, values, cache) },
                { _ = try attended(queries, keys, values, cache, mask: .array(mask)) },
            ] as [() throws -> Void] {
                #expect(throws: MLXError.self) { try body() }
                #expect((cache.offset, cache.size) == (offset, size))
            }
            _ = try attended(queries, keys, values, cache)
            #expect(cache.offset == offset + count)
        }
    }

    @Test func slidingWindowsAreRefused() throws {
        let cache = H2OKVCache(try small())
        #expect(throws: MLXError.self) {
            try withError { cache.makeMask(n: 4, windowSize: 2, returnArray: false) }
        }
    }
}
