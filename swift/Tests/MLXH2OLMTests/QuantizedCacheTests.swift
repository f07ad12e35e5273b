import Foundation
import MLX
import MLXH2O
import MLXLMCommon
import Testing

@testable import MLXH2OLM

@Suite struct QuantizedCacheTests {
    private func configuration(
        _ policy: PolicyName = .h2oEma, evictEvery: Int = 4, bits: Int = 8, valueBits: Int? = nil
    ) throws -> H2OConfiguration {
        try H2OConfiguration(
            .init(16, sinkSize: 2, heavySize: 8, evictEvery: evictEvery),
            .named(kvBits: bits, valueBits: valueBits, isFramed: false, groupSize: 32),
            policy: .init(policy))
    }

    private func step(
        _ tokens: Tokens, _ range: Range<Int>, _ cache: any KVCache
    ) throws -> [Float] {
        try withError { attend(tokens, range, cache).asArray(Float.self) }
    }

    private func rows(_ shape: [Int]) -> MLXArray { MLXArray.zeros(shape, dtype: .float32) }

    /// No row is touched by what happens to others.
    @Test(arguments: [1, 3]) func rowsAreQuantisedOnce(evictEvery: Int) throws {
        let settings = try configuration(.window, evictEvery: evictEvery, bits: 4)
        let tokens = Tokens(count: 60, seed: 12)
        let cache = QuantizedH2OKVCache(settings)
        decode(tokens, 0..<60, cache)
        let (words, scales, biases) = quantized(tokens.slice(0..<60).keys, groupSize: 32, bits: 4)
        let keys = dequantized(words, scales: scales, biases: biases, groupSize: 32, bits: 4)
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
            eval(try cache.append(keys: keys, values: values).keys)
            let packedKeys = try #require(cache.packedKeys)
            let packedValues = try #require(cache.packedValues)
            #expect(packedKeys.words.shape == [1, 2, min(16, token + 1), 4])
            #expect(packedValues.words.shape == [1, 2, min(16, token + 1), 8])
            #expect(packedKeys.scales.shape == [1, 2, min(16, token + 1), 1])
        }
        #expect((cache.bits, cache.groupSize) == (4, 32))
        // Words, scales and biases of 2 heads of 16 rows; positions of all but the newest.
        #expect(cache.nbytes == 2 * (16 * (16 + 32 + 4 * 4) + 15 * 4))
    }

    @Test func widthsTakeTheGroupThatDividesThem() throws {
        let cache = QuantizedH2OKVCache(try H2OConfiguration(.init(8)))
        #expect((cache.bits, cache.groupSize) == (8, 64))
        _ = try cache.append(keys: rows([1, 2, 1, 96]), values: rows([1, 2, 1, 32]))
        #expect(cache.groupSize == 32)
        let odd = QuantizedH2OKVCache(
            try H2OConfiguration(.init(8), .affine(8, isFramed: false)), name: "layer 5")
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
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let tokens = Tokens(count: 60, seed: 14)
        let cache = QuantizedH2OKVCache(try configuration(valueBits: 4), name: "layer 3")
        decode(tokens, 0..<30, cache)
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
        decode(tokens, 0..<12, cache)
        #expect(cache.trim(4) == 4)
        decode(tokens, 0..<8, other)
        for token in 8..<40 {
            let outputs = try [cache, other].map { try step(tokens, token..<token + 1, $0) }
            #expect(outputs[0] == outputs[1])
        }
    }

    /// Rows in 16 bits are rounded once, as in Python and in the operations over packed rows.
    @Test(arguments: [DType.float16, .bfloat16]) func rowsAreRoundedOnce(dtype: DType) throws {
        let rows = MLXRandom.normal([1, 2, 40, 64], dtype: .float32, key: MLXRandom.key(1))
        let cache = QuantizedH2OKVCache(
            try H2OConfiguration(.init(64), .affine(5, isFramed: false)))
        _ = try cache.append(keys: (rows * Float(3)).asType(dtype), values: rows.asType(dtype))
        let packed = try #require(cache.packedKeys)
        let exact = dequantized(
            packed.words, scales: packed.scales.asType(.float32),
            biases: packed.biases.asType(.float32), groupSize: 64, bits: 5)
        let found = try #require(cache.keys)
        #expect(found.dtype == dtype)
        guard Device.defaultDevice().deviceType == .cpu else { return }
        #expect(
            found.asType(.float32).asArray(Float.self)
                == exact.asType(dtype).asType(.float32).asArray(Float.self))
    }
}
