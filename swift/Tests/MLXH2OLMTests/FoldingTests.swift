import Foundation
import MLX
import MLXH2O
import MLXH2OLM
import MLXLMCommon
import Testing

/// Rows that are folded: what traces do not tell.
@Suite struct FoldingTests {
    private func folding(
        rows: Int = 16, bits: Int? = nil, contextSize: Int? = nil, folds: Bool = true
    ) throws -> H2OConfiguration {
        try H2OConfiguration(
            .init(rows, sinkSize: 2, recentSize: 5, evictEvery: 3, contextSize: contextSize),
            .named(kvBits: bits, groupSize: 32), policy: .init(.h2o, folds: folds))
    }

    private func fed(_ cache: H2OKVCache, _ tokens: Tokens, _ lengths: [Int]) throws {
        for length in lengths {
            let range = cache.offset..<cache.offset + length
            try withError { eval(attend(tokens, range, cache)) }
        }
    }

    /// Every row that goes is folded, not the nearer half alone.
    private struct Everything: EvictionPolicy {
        let rule = H2OPolicy()
        var needsScores: Bool { true }
        var needsWeights: Bool { true }
        var chunkQueries: Int? { nil }
        var kind: ChunkScores? { .mass }
        var folds: Bool { true }

        func takes(_ ranks: MLXArray) -> MLXArray { rule.takes(ranks) }
        func accumulate(
            _ importance: MLXArray, scores: MLXArray, positions: MLXArray, isMasked: Bool
        ) throws -> MLXArray {
            try rule.accumulate(
                importance, scores: scores, positions: positions, isMasked: isMasked)
        }
        func rank(_ rows: PolicyRows) throws -> MLXArray { try rule.rank(rows) }
    }

    /// Every token seen is in one row of each head.
    @Test(arguments: [nil, 8]) func noTokenIsLost(bits: Int?) throws {
        let cache = evictingCache(try folding(bits: bits), policy: Everything())
        let tokens = Tokens(count: 120, seed: 31)
        for length in [5] + Array(repeating: 1, count: 30) + [40, 1, 3] {
            try fed(cache, tokens, [length])
            if let bias = cache.rowBias {
                let counts = bias.exp().sum(axis: 2).asArray(Float.self)
                #expect(counts.allSatisfy { abs($0 - Float(cache.offset)) < 1e-3 })
            }
            if length == 1 { #expect(cache.size <= 16) }
        }
        try cache.flush()
        #expect(cache.size == 16)
    }

    @Test func thereIsNoBiasUntilRowsAreFolded() throws {
        let cache = H2OKVCache(try folding())
        let tokens = Tokens(count: 20, seed: 32)
        try fed(cache, tokens, Array(repeating: 1, count: 16))
        #expect(cache.rowBias == nil)
        try fed(cache, tokens, [1])
        #expect(cache.rowBias?.shape == [1, 2, 14])
    }

    @Test func rowsAreDroppedWhereNoneIsFolded() throws {
        let cache = H2OKVCache(try folding(folds: false))
        try fed(cache, Tokens(count: 40, seed: 34), [20] + Array(repeating: 1, count: 20))
        #expect(cache.evicted > 0 && cache.rowBias == nil)
    }

    /// More queries than one block has.
    @Test(arguments: [false, true]) func longChunksAreReadInBlocks(asArray: Bool) throws {
        let cache = H2OKVCache(try folding())
        let tokens = Tokens(count: 330, seed: 33)
        try fed(cache, tokens, [20, 1, 1, 1])
        let mask = cache.makeMask(n: 300, windowSize: nil, returnArray: asArray)
        let output = try withError { attend(tokens, 23..<323, cache, mask: mask) }
        let expected = try MLXFast.scaledDotProductAttentionWithScores(
            queries: tokens.slice(23..<323).queries, keys: #require(cache.keys),
            values: #require(cache.values), scale: 0.25, mask: .causal, rowBias: cache.rowBias
        ).0
        #expect(furthest(output, expected) < 1e-5)
    }

    @Test(arguments: [nil, 4]) func copiesAndFilesHoldEverything(bits: Int?) throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let tokens = Tokens(count: 80, seed: 34)
        let cache = evictingCache(try folding(bits: bits, contextSize: 35))
        try fed(cache, tokens, [30] + Array(repeating: 1, count: 9))
        try H2OKVCache.save([cache], to: url)
        let read = try #require(try H2OKVCache.load(from: url).0[0] as? H2OKVCache)
        #expect(read.configuration == cache.configuration)
        let copy = try #require(cache.copy() as? H2OKVCache)
        #expect(
            read.rowBias?.asArray(Float.self) == cache.rowBias?.asArray(Float.self))
        for token in 39..<60 {
            let outputs = try [cache, copy, read].map { one in
                try withError { attend(tokens, token..<token + 1, one).asArray(Float.self) }
            }
            #expect(outputs[0] == outputs[1])
            #expect(outputs[0] == outputs[2])
        }
        #expect(sortedPositions(read.positions) == sortedPositions(cache.positions))
    }
}
