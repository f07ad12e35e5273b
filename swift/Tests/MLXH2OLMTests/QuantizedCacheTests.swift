import Foundation
import MLX
import MLXH2O
import MLXLMCommon
import Testing

@testable import MLXH2OLM

/// The quantised cache against the slow reference on rows that were rounded once, as they come.
@Suite struct QuantizedCacheTests {
    private let scale = Float(32).squareRoot() / 32

    private func configuration(
        _ policy: PolicyName = .h2oEma, rows: Int = 16, evictEvery: Int = 4, bits: Int = 8,
        valueBits: Int? = nil
    ) throws -> H2OConfiguration {
        try H2OConfiguration(
            maxKVSize: rows, sinkSize: 2, heavySize: rows / 2, policy: policy,
            evictEvery: evictEvery, kvBits: bits, valueBits: valueBits, kvFrame: false,
            kvGroupSize: 32)
    }

    private func step(
        _ tokens: Tokens, _ range: Range<Int>, _ cache: any KVCache
    ) throws -> [Float] {
        let (queries, keys, values) = tokens.slice(range)
        return try withError {
            MLXH2OLM.attentionWithCacheUpdate(
                queries: queries, keys: keys, values: values, cache: cache, scale: scale,
                mask: range.count > 1 ? .causal : .none
            ).asArray(Float.self)
        }
    }

    private func rows(_ shape: [Int]) -> MLXArray { MLXArray.zeros(shape, dtype: .float32) }

    /// A chunk of each kind, then single tokens far beyond the budget.
    @Test(arguments: PolicyName.allCases, [nil, H2OBackend.composed])
    func everyStepIsThatOfTheReference(policy: PolicyName, backend: H2OBackend?) throws {
        let settings = try configuration(policy, bits: 8, valueBits: 4)
        let tokens = Tokens(count: 90, seed: 11)
        let rounded = tokens.rounded(bits: 8, valueBits: 4, groupSize: 32)
        let cache = QuantizedH2OKVCache(settings)
        var reference = ReferenceCache(settings, scale: scale, group: 2)
        reference.pack = {
            (
                Tokens.rounded($0, bits: 8, groupSize: 32),
                Tokens.rounded($1, bits: 4, groupSize: 32)
            )
        }
        var start = 0
        try withBackend(backend) {
            for length in [12, 3, 9] + Array(repeating: 1, count: 60) + [4] {
                let range = start..<start + length
                start += length
                let output = try step(tokens, range, cache)
                let lists = rounded.lists(range)
                var expected = reference.step(
                    queries: lists.queries, keys: lists.keys, values: lists.values)
                if policy == .h2o {
                    let off = reference.follow(
                        keys: Tokens.lists(of: try #require(cache.keys)),
                        values: Tokens.lists(of: try #require(cache.values)),
                        positions: slots(of: try #require(cache.positions)), bits: (8, 4))
                    #expect(off < 2.2, "tokens \(range)")  // two packings, each a step off
                    expected = reference.attend(lists.queries)
                }
                let errors = zip(output, expected.joined().joined()).map { abs(Double($0) - $1) }
                #expect(errors.allSatisfy { $0 < 1e-4 }, "tokens \(range)")
                #expect(sortedPositions(cache.positions) == reference.positions, "tokens \(range)")
            }
        }
        #expect(cache.offset == 88)
        #expect(cache.evicted > 0)
    }

    /// No row is touched by what happens to others.
    @Test(arguments: [1, 3]) func rowsAreQuantisedOnce(evictEvery: Int) throws {
        let settings = try configuration(.window, evictEvery: evictEvery, bits: 4)
        let tokens = Tokens(count: 60, seed: 12)
        let cache = QuantizedH2OKVCache(settings)
        for token in 0..<60 { _ = try step(tokens, token..<token + 1, cache) }
        let (_, keys, _) = tokens.rounded(bits: 4, valueBits: 4, groupSize: 32).slice(0..<60)
        let positions = try #require(cache.positions)
        let wide = broadcast(
            positions.expandedDimensions(axis: -1), to: positions.shape + [keys.dim(3)])
        let expected = takeAlong(keys, wide, axis: 2)
        let stored = try #require(cache.keys)
        #expect(stored.asArray(Float.self) == expected.asArray(Float.self))
    }

    @Test func packedRowsAreHandedOutAsTheyAreStored() throws {
        let tokens = Tokens(count: 40, seed: 13)
        let cache = QuantizedH2OKVCache(
            try configuration(.window, evictEvery: 1, bits: 4, valueBits: 8))
        for token in 0..<30 {
            let (_, keys, values) = tokens.slice(token..<token + 1)
            let (packedKeys, packedValues) = try cache.appendPacked(keys: keys, values: values)
            #expect(packedKeys.words.shape == [1, 2, min(16, token + 1), 4])
            #expect(packedValues.words.shape == [1, 2, min(16, token + 1), 8])
            #expect(packedKeys.scales.shape == [1, 2, min(16, token + 1), 1])
            eval(packedKeys.words)
        }
        #expect((cache.bits, cache.groupSize) == (4, 32))
        // Words, scales and biases of 2 heads of 16 rows; positions of all but the newest.
        #expect(cache.nbytes == 2 * (16 * (16 + 32 + 4 * 4) + 15 * 4))
    }

    @Test func widthsTakeTheGroupThatDividesThem() throws {
        let cache = QuantizedH2OKVCache(try H2OConfiguration(maxKVSize: 8))
        #expect((cache.bits, cache.groupSize) == (8, 64))
        _ = try cache.append(keys: rows([1, 2, 1, 96]), values: rows([1, 2, 1, 32]))
        #expect(cache.groupSize == 32)
        let odd = QuantizedH2OKVCache(
            try H2OConfiguration(maxKVSize: 8, kvBits: 8, kvFrame: false), name: "layer 5")
        let error = #expect(throws: H2OError.self) {
            try odd.append(keys: rows([1, 2, 1, 80]), values: rows([1, 2, 1, 80]))
        }
        #expect(
            try #require(error).description
                == "[QuantizedH2OKVCache] the cache of layer 5 has keys of 80 and values of 80 "
                + "elements, which neither kvGroupSize = 64 nor 32 divides: expected multiples of "
                + "32, or kvBits nil.")
        #expect(odd.keys == nil)
    }

    @Test func copiesAndFilesHoldEverything() throws {
        let url = FileManager.default.temporaryDirectory
            .appending(path: "mlx-h2o-\(UUID().uuidString).safetensors")
        defer { try? FileManager.default.removeItem(at: url) }
        let tokens = Tokens(count: 60, seed: 14)
        let cache = QuantizedH2OKVCache(try configuration(valueBits: 4), name: "layer 3")
        for token in 0..<30 { _ = try step(tokens, token..<token + 1, cache) }
        let plain = try filled(12, small(), tokens)
        try H2OKVCache.save([cache, plain], to: url)
        let (loaded, _) = try H2OKVCache.load(from: url)
        let copy = try #require(cache.copy() as? QuantizedH2OKVCache)
        let read = try #require(loaded[0] as? QuantizedH2OKVCache)
        #expect(!(loaded[1] is QuantizedH2OKVCache))
        #expect(read.configuration == cache.configuration)
        #expect(read.packedValues?.words.shape == [1, 2, 14, 4])
        for token in 30..<60 {
            let outputs = try [cache, copy, read].map { try step(tokens, token..<token + 1, $0) }
            #expect(outputs[0] == outputs[1])
            #expect(outputs[0] == outputs[2])
        }
        #expect(sortedPositions(read.positions) == sortedPositions(cache.positions))
        let state = cache.state
        #expect(state.count == 8)
        for wrong in [
            Array(state.dropLast()), [state[0], state[0]] + state[2...],
            [state[1]] + state[1...], state.map { $0[0..., 0..., ..<0] },
        ] {
            #expect(throws: MLXError.self) { try withError { copy.state = wrong } }
        }
        #expect(throws: MLXError.self) { try withError { plain.state = state } }
    }

    @Test func trimmingForgetsTheLastRows() throws {
        let tokens = Tokens(count: 40, seed: 15)
        let (cache, other) = (
            QuantizedH2OKVCache(try configuration(.keydiff)),
            QuantizedH2OKVCache(try configuration(.keydiff))
        )
        for token in 0..<12 { _ = try step(tokens, token..<token + 1, cache) }
        #expect(cache.trim(4) == 4)
        for token in 0..<8 { _ = try step(tokens, token..<token + 1, other) }
        for token in 8..<40 {
            let outputs = try [cache, other].map { try step(tokens, token..<token + 1, $0) }
            #expect(outputs[0] == outputs[1])
        }
    }
}

/// Positions [1, H, N] as lists, one per head.
private func slots(of positions: MLXArray) -> [[Int]] {
    let (all, count) = (positions.asArray(Int32.self).map { Int($0) }, positions.dim(2))
    return stride(from: 0, to: all.count, by: count).map { Array(all[$0..<$0 + count]) }
}
