import Foundation
import MLX
import MLXH2O
import MLXLMCommon
import Testing

@testable import MLXH2OLM

/// Caches whose rows are codes; tests/languages/test_swift_caches.py holds them to Python's.
@Suite struct CodedCacheTests {
    private func settings(
        _ format: KVFormat, _ policy: PolicyName = .window
    ) throws -> H2OConfiguration {
        try H2OConfiguration(
            .init(16, sinkSize: 2, heavySize: 8, evictEvery: 1), .codes(format, groupSize: 32),
            policy: .init(policy))
    }

    /// A chunk, then tokens beyond the budget: attention is that over the rows as they read.
    @Test(arguments: KVFormat.allCases, [nil, H2OBackend.composed])
    func attentionReadsTheCodes(format: KVFormat, backend: H2OBackend?) throws {
        let tokens = Tokens(count: 40, seed: 21)
        let cache = evictingCache(try settings(format, .h2oEma))
        try withBackend(backend) {
            eval(try withError { attend(tokens, 0..<12, cache) })
            for token in 12..<40 {
                let range = token..<token + 1
                let found = try withError { attend(tokens, range, cache) }
                let expected = MLXFast.scaledDotProductAttention(
                    queries: tokens.slice(range).queries, keys: try #require(cache.keys),
                    values: try #require(cache.values), scale: 0.25, mask: .none)
                #expect(furthest(found, expected) < 1e-4)
            }
        }
        #expect((cache.size, cache.offset) == (16, 40))
    }

    @Test func rowsAreNearWhatCame() throws {
        let tokens = Tokens(count: 16, size: 128, seed: 22)
        let cache = H2OKVCache(try settings(.turbo4))
        let (_, keys, values) = tokens.slice(0..<16)
        _ = try cache.append(keys: keys, values: values)
        for (stored, rows) in [(cache.keys, keys), (cache.values, values)] {
            func squares(_ of: MLXArray) -> Float {
                of.asArray(Float.self).reduce(0) { $0 + $1 * $1 }
            }
            #expect(squares(try #require(stored) - rows) < 0.012 * squares(rows))
        }
    }

    @Test func bytesAreThoseOfTheFormat() throws {
        let cache = H2OKVCache(try settings(.turbo3))
        let (_, keys, values) = Tokens(count: 16, seed: 23).slice(0..<16)
        _ = try cache.append(keys: keys, values: values)
        // Words and norms of keys and values, of 2 heads.
        #expect(cache.nbytes == 2 * 16 * 2 * (12 + 4))
    }

    @Test func filesKeepTheDTypeOfRows() throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let cache = H2OKVCache(try settings(.turbo0v2))
        let (_, keys, values) = Tokens(count: 9, seed: 24).slice(0..<9)
        _ = try cache.append(keys: keys.asType(.float16), values: values.asType(.float16))
        try H2OKVCache.save([cache], to: url)
        let loaded = try #require(try H2OKVCache.load(from: url).caches.first as? H2OKVCache)
        #expect(loaded.configuration == cache.configuration)
        #expect(loaded.values?.dtype == .float16)
        #expect(throws: H2OError.self) { try loaded.append(keys: keys, values: values) }
    }

    @Test func sizesThatHaveNoCodesAreNamed() throws {
        let cache = H2OKVCache(try settings(.turbo8v3), name: "layer 5")
        let rows = MLXArray.zeros([1, 2, 1, 96], dtype: .float32)
        let error = #expect(throws: H2OError.self) { try cache.append(keys: rows, values: rows) }
        #expect(
            try #require(error).description
                == "[H2OKVCache] the cache of layer 5 has values of 96 elements, and kvFormat is "
                + "'turbo8v3': expected a power of two from 32 to 1024, or kvBits.")
        let state = [12, 1, 12, 1].map { MLXArray.zeros([1, 2, 3, $0], dtype: .uint32) }
        #expect(throws: MLXError.self) { try withError { cache.state = state } }
    }
}
