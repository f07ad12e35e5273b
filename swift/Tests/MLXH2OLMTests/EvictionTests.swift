import MLX
import MLXH2O
import MLXLMCommon
import Testing

@testable import MLXH2OLM

@Suite struct EvictionTests {
    private let scale = Float(32).squareRoot() / 32

    private func reference(_ configuration: H2OConfiguration) -> ReferenceCache {
        ReferenceCache(
            maxKVSize: configuration.maxKVSize, sinkSize: configuration.sinkSize,
            recentSize: configuration.recentSize, policy: configuration.policy.rawValue,
            decay: configuration.decay, scale: Double(scale), group: 2,
            sharedHeads: configuration.sharedHeads, heads: [[], []])
    }

    /// Feeds both, and compares what attention says and which rows stay.
    private func feed(
        _ range: Range<Int>, of tokens: Tokens, to cache: H2OKVCache,
        and reference: inout ReferenceCache
    ) throws {
        let (queries, keys, values) = tokens.slice(range)
        let output = try withError {
            let output = MLXH2OLM.attentionWithCacheUpdate(
                queries: queries, keys: keys, values: values, cache: cache, scale: scale,
                mask: range.count > 1 ? .causal : .none)
            eval(output)
            return output.asArray(Float.self)
        }
        let lists = tokens.lists(range)
        let expected = reference.step(
            queries: lists.queries, keys: lists.keys, values: lists.values)
        let errors = zip(output, expected.joined().joined()).map { abs(Double($0) - $1) }
        #expect(errors.allSatisfy { $0 < 1e-5 }, "tokens \(range)")
    }

    /// Lq 1 to 8 after 100 replacements, and a token behind them; the slots differ in every head.
    @Test(arguments: PolicyName.allCases, [Backend.native, .composed])
    func chunksAfterReplacements(policy: PolicyName, backend: Backend) throws {
        let configuration = try H2OConfiguration(
            maxKVSize: 24, sinkSize: 2, heavySize: 12, policy: policy)
        let tokens = Tokens(count: 140, seed: 1)
        let replaced = H2OKVCache(configuration)
        var expected = reference(configuration)
        try withBackend(backend) {
            try feed(0..<24, of: tokens, to: replaced, and: &expected)
            for token in 24..<124 {
                try feed(token..<token + 1, of: tokens, to: replaced, and: &expected)
            }
        }
        #expect(replaced.evicted == 100)
        #expect(replaced.size == 24)
        #expect(replaced.offset == 124)
        let slots = try #require(replaced.positions).asArray(Int32.self)
        if policy != .window { #expect(slots[..<24] != slots[24...]) }
        for length in 1...8 {
            let cache = try #require(replaced.copy() as? H2OKVCache)
            var reference = expected
            try withBackend(backend) {
                try feed(124..<124 + length, of: tokens, to: cache, and: &reference)
                let next = 124 + length
                try feed(next..<next + 1, of: tokens, to: cache, and: &reference)
            }
            #expect(
                sortedPositions(cache.positions) == [0, 1].map { reference.positions(head: $0) })
        }
    }

    /// Chunks above and below 8 and 32 queries, and single tokens between them; each head by itself
    /// and all by the mean of their ranks.
    @Test(arguments: PolicyName.allCases, [false, true])
    func everyPolicyThroughChunks(policy: PolicyName, sharedHeads: Bool) throws {
        for backend in [Backend.native, .composed] {
            try throughChunks(
                H2OConfiguration(
                    maxKVSize: 20, sinkSize: 2, heavySize: 9, policy: policy,
                    sharedHeads: sharedHeads), backend)
        }
    }

    private func throughChunks(_ configuration: H2OConfiguration, _ backend: Backend) throws {
        let tokens = Tokens(count: 180, seed: 23)
        let cache = H2OKVCache(configuration)
        cache.secondReadBytes = 0
        var reference = reference(configuration)
        let ones = Array(repeating: 1, count: 12)
        var start = 0
        try withBackend(backend) {
            for length in [40] + ones + [9] + ones + [36, 8, 3] + ones + [31] + ones {
                try feed(start..<start + length, of: tokens, to: cache, and: &reference)
                start += length
                let expected = [0, 1].map { reference.positions(head: $0) }
                #expect(sortedPositions(cache.positions) == expected, "after \(start)")
                if configuration.sharedHeads { #expect(expected[0] == expected[1]) }
            }
        }
    }

    /// The chunk is stored behind the others and cut down at the next occasion, not before.
    @Test func theSurplusOfAChunkGoesLate() throws {
        let configuration = try H2OConfiguration(maxKVSize: 16, sinkSize: 2, heavySize: 8)
        let tokens = Tokens(count: 60, seed: 9)
        let cache = H2OKVCache(configuration)
        var reference = reference(configuration)
        var start = 0
        for length in [10, 30, 1, 5, 12, 1, 1] {
            try feed(start..<start + length, of: tokens, to: cache, and: &reference)
            start += length
            #expect(cache.positions?.dim(2) == reference.heads[0].count)
            #expect(cache.isTrimmable == (start == 10))
        }
        reference.settle()
        #expect(cache.size == 16)
        #expect(
            sortedPositions(cache.positions) == [0, 1].map { reference.positions(head: $0) })
    }

    /// Replacement in place keeps what compaction by gather keeps, at every step.
    @Test(arguments: PolicyName.allCases, [Backend.native, .composed])
    func replacementEqualsCompaction(policy: PolicyName, backend: Backend) throws {
        let configuration = try H2OConfiguration(
            maxKVSize: 16, sinkSize: 3, heavySize: 6, policy: policy)
        let tokens = Tokens(count: 120, seed: 5)
        let cache = H2OKVCache(configuration)
        let ranking = configuration.makePolicy()
        var store: RowStore?
        try withBackend(backend) {
            for token in 0..<120 {
                let (queries, keys, values) = tokens.slice(token..<token + 1)
                _ = try cache.append(keys: keys, values: values)
                var gathered = store ?? RowStore(emptyLike: keys, values, packing: nil)
                if gathered.length == configuration.maxKVSize {
                    let (oldKeys, oldValues) = gathered.dense()
                    let ranks = try ranking.rank(
                        PolicyRows(
                            keys: oldKeys, values: oldValues, importance: gathered.importance,
                            positions: gathered.positions, offset: token))
                    try gathered.keep(
                        try keepIndices(
                            ranks, positions: gathered.positions, keep: 15, sinkSize: 3,
                            recentStart: token + 1 - configuration.recentSize))
                }
                try gathered.append(keys, values, offset: token, limit: 16)
                let scores = try attention(queries, gathered.dense())
                gathered.importance = try ranking.importance(
                    of: gathered, scores: scores, lse: nil, isMasked: true)
                store = gathered
                let (ownKeys, ownValues) = (try #require(cache.keys), try #require(cache.values))
                try cache.accumulate(try attention(queries, (ownKeys, ownValues)))
                #expect(sortedPositions(cache.positions) == sortedPositions(gathered.positions))
            }
        }
        #expect(cache.evicted == 104)
        #expect(cache.keys?.shape == [1, 2, 16, 32])
    }

    private func attention(
        _ queries: MLXArray, _ rows: (keys: MLXArray, values: MLXArray)
    ) throws -> MLXArray {
        try MLXFast.scaledDotProductAttentionWithScores(
            queries: queries, keys: rows.keys, values: rows.values, scale: scale
        ).1
    }

    @Test(arguments: [1, 2, 5]) func evictEveryBoundsTheRows(every: Int) throws {
        let configuration = try H2OConfiguration(
            maxKVSize: 8, sinkSize: 1, policy: .window, evictEvery: every)
        let tokens = Tokens(count: 40, seed: 2)
        let cache = H2OKVCache(configuration)
        var sizes: Set<Int> = []
        for token in 0..<40 {
            let (_, keys, values) = tokens.slice(token..<token + 1)
            _ = try cache.append(keys: keys, values: values)
            if token >= 20 { sizes.insert(cache.size) }
        }
        #expect(sizes == Set(8...8 + every - 1))
        let newest = sortedPositions(cache.positions)[0].suffix(7)
        #expect(Array(newest) == Array(33..<40))
    }

    /// A budget of one row must not ask for the best 0 of 1.
    @Test func aBudgetOfOneRow() throws {
        let cache = H2OKVCache(
            try H2OConfiguration(maxKVSize: 1, sinkSize: 0, policy: .window, evictEvery: 2))
        let tokens = Tokens(count: 6, seed: 4)
        for token in 0..<6 {
            let (_, keys, values) = tokens.slice(token..<token + 1)
            _ = try cache.append(keys: keys, values: values)
        }
        #expect(sortedPositions(cache.positions)[0].last == 5)
        #expect(cache.size <= 2)
    }
}
