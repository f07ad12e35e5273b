import Foundation
import MLX
import MLXH2O
import MLXLMCommon
import Testing

@testable import MLXH2OLM

/// Caches whose newest rows are not quantised yet.
@Suite struct NewestRowsTests {
    private func configuration(
        _ rows: Int? = nil, denseSize: Int? = nil, isFramed: Bool = true, speculative: Int = 0,
        policy: PolicyName = .keydiff
    ) throws -> H2OConfiguration {
        try H2OConfiguration(
            .init(rows, sinkSize: 2, speculative: speculative),
            .affine(8, valueBits: 4, denseSize: denseSize, isFramed: isFramed, groupSize: 32),
            policy: .init(policy))
    }

    /// Every row is read: as it came, or from 8 and 4 bits.
    @Test(arguments: [true, false], [PolicyName.keydiff, .h2o, .h2oEma])
    func allRowsAreRead(isFramed: Bool, policy: PolicyName) throws {
        let tokens = Tokens(count: 120, seed: 31)
        let cache = evictingCache(try configuration(isFramed: isFramed, policy: policy))
        let whole = H2OKVCache(try H2OConfiguration(.init(nil), policy: .init(policy)))
        var start = 0
        for length in [3, 1, 1, 50, 1, 2, 8, 1, 9, 1, 1] + Array(repeating: 1, count: 40) {
            let range = start..<start + length
            let output = try withError { attend(tokens, range, cache) }
            eval(attend(tokens, range, whole))
            start += length
            #expect((cache.size, cache.evicted) == (start, 0))
            let (keys, values) = (try #require(cache.keys), try #require(cache.values))
            let expected = MLXFast.scaledDotProductAttention(
                queries: tokens.slice(range).queries, keys: keys, values: values, scale: 0.25,
                mask: length > 1 ? .causal : .none)
            #expect(furthest(output, expected) < 1e-4)
            let (given, newest) = (tokens.slice(0..<start).keys, start - min(start, 8))
            #expect(furthest(keys, given) < 0.05)
            #expect(furthest(keys[0..., 0..., newest...], given[0..., 0..., newest...]) < 1e-5)
            guard policy == .h2o else { continue }
            #expect(furthest(try #require(cache.scores), try #require(whole.scores)) < 0.2)
        }
        // All but the newest of a chunk were quantised together, and later 32 rows.
        #expect(cache.table?.segments.map(\.length) == [47 + 32, 39])
    }

    @Test func arraysOfMasksAreServed() throws {
        let tokens = Tokens(count: 80, seed: 32)
        let caches = try (0..<2).map { _ in evictingCache(try configuration(policy: .h2oEma)) }
        for cache in caches { eval(attend(tokens, 0..<60, cache)) }
        for start in [60, 64] {
            let mask = caches[1].makeMask(n: 4, windowSize: nil, returnArray: true)
            #expect(mask.mask?.shape == [4, start + 4])
            let outputs = try zip(caches, [.causal, mask]).map { cache, mask in
                try withError { attend(tokens, start..<start + 4, cache, mask: mask) }
            }
            #expect(furthest(outputs[0], outputs[1]) < 1e-4)
        }
        let scores = try caches.map { try #require($0.scores) }
        #expect(furthest(scores[0], scores[1]) < 1e-4)
    }

    @Test(arguments: [0, 2]) func trimmedCopiedAndSavedRowsAreTheSame(speculative: Int) throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let tokens = Tokens(count: 200, seed: 33)
        let cache = evictingCache(
            try configuration(speculative: speculative, policy: .h2o), name: "layer 3")
        #expect(cache.isTrimmable)
        #expect(cache.maxSize == nil)
        eval(attend(tokens, 0..<70, cache))
        decode(tokens, 70..<100, cache)
        for count in [3, 20, 30] {
            #expect(cache.trim(count) == count)
            let given = tokens.slice(0..<cache.offset).keys
            #expect(furthest(try #require(cache.keys), given) < 0.05)
            try H2OKVCache.save([cache], to: url)
            let read = try #require(try H2OKVCache.load(from: url).caches[0] as? H2OKVCache)
            #expect(read.configuration == cache.configuration)
            let (copy, stated) = (cache.duplicate(), evictingCache(cache.configuration))
            stated.state = cache.state
            #expect(cache.state.count == 12)
            for token in cache.offset..<cache.offset + 40 {
                let outputs = try [cache, copy, read, stated].map { one in
                    try withError { attend(tokens, token..<token + 1, one).asArray(Float.self) }
                }
                #expect(outputs.dropFirst().allSatisfy { $0 == outputs[0] })
            }
        }
        #expect(cache.trim(1000) == 167)
        #expect(cache.state.isEmpty)
        decode(tokens, 0..<50, cache)
        #expect(cache.size == 50)
    }

    /// With a budget, rows of few bits and the newest: no more than the budget.
    @Test(arguments: [0, 2]) func rowsWithABudgetEvict(speculative: Int) throws {
        let tokens = Tokens(count: 120, seed: 34)
        let cache = evictingCache(
            try configuration(24, denseSize: 4, speculative: speculative, policy: .h2o))
        eval(attend(tokens, 0..<40, cache))
        for token in 40..<120 {
            eval(attend(tokens, token..<token + 1, cache))
            #expect(cache.size <= 24)
            let positions = try #require(cache.positions)
            let dense = try #require(cache.table?.tail.length)
            let last = positions[0..., 0..., (cache.size - dense)...].asArray(Int32.self)
            #expect(Array(last.prefix(dense)) == Array(Int32(token + 1 - dense)...Int32(token)))
            #expect(dense >= 4)
            #expect(cache.rowBias == nil)
        }
    }

    /// None of them is lost, even if drafts may still be taken back.
    @Test func allRowsOfAStateMayBeQuantised() throws {
        let tokens = Tokens(count: 40, seed: 37)
        let packed = evictingCache(try configuration(24, denseSize: 0))
        eval(attend(tokens, 0..<24, packed))
        let none = MLXArray.zeros([1, 2, 0, 32], dtype: .float32)
        var state = packed.state
        state.insert(none, at: 7)
        state.insert(none, at: 3)
        let cache = evictingCache(try configuration(24, denseSize: 4, speculative: 3))
        cache.state = state
        for token in 24..<40 {
            eval(attend(tokens, token..<token + 1, cache))
            #expect(cache.size == 24)
            let newest = Array(token - 3...token)
            #expect(sortedPositions(cache.positions).allSatisfy { $0.suffix(4) == newest[...] })
        }
    }

    @Test func statesThatDoNotFitAreReported() throws {
        let tokens = Tokens(count: 60, seed: 35)
        let cache = evictingCache(try configuration())
        eval(attend(tokens, 0..<60, cache))
        try cache.flush()
        let (state, other) = (cache.state, evictingCache(try configuration(denseSize: 0)))
        #expect(throws: MLXError.self) { try withError { other.state = state } }
        for (place, change) in [
            (0, { $0[0..., 0..., ..<9] }), (3, { $0[0..., 0..., ..<3] }),
            (3, { $0[.ellipsis, ..<16] }), (3, { $0.asType(.float16) }),
            (8, { $0[0..., ..<1] }), (10, { $0[0..., 0..., ..<8] }),
        ] as [(Int, (MLXArray) -> MLXArray)] {
            var wrong = state
            wrong[place] = change(wrong[place])
            #expect(throws: MLXError.self) { try withError { cache.state = wrong } }
        }
        cache.state = state
        #expect(cache.size == 60)
    }
}
