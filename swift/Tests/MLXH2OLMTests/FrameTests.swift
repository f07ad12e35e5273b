import Foundation
import MLX
import MLXH2O
import MLXLMCommon
import Testing

@testable import MLXH2OLM

/// Packed rows in a frame of their head: attention and scores do not see it.
@Suite struct FrameTests {
    private let lengths = [9, 1, 3, 1, 12, 1, 1]

    private func cache(
        _ policy: PolicyName, rows: Int = 64, kvFrame: Bool = true
    ) throws -> H2OKVCache {
        evictingCache(
            try H2OConfiguration(
                .init(rows, sinkSize: 2), .affine(8, isFramed: kvFrame, groupSize: 32),
                policy: .init(policy)))
    }

    private func random(_ heads: Int, _ length: Int, _ size: Int, _ seed: Int) -> MLXArray {
        MLXRandom.normal(
            [1, heads, length, size], dtype: .float32, key: MLXRandom.key(UInt64(seed)))
    }

    /// Keys share a large constant, as a bias of their projection makes one. The first value of the
    /// first head is small if the seed is 0, as those of attention sinks are.
    private func tokens(_ length: Int, _ size: Int, _ seed: Int) -> [MLXArray] {
        let bias = random(2, 1, size, 1) * Float(8)
        let factors = (0..<2 * length).map { seed + $0 == 0 ? Float(0.1) : 1 }
        return [
            random(4, length, size, 3 * seed), random(2, length, size, 3 * seed + 1) + bias,
            random(2, length, size, 3 * seed + 2) * MLXArray(factors, [1, 2, length, 1]),
        ]
    }

    private func step(_ cache: H2OKVCache, _ rows: [MLXArray]) throws -> MLXArray {
        try attended(rows[0], rows[1], rows[2], cache, scale: 0.2)
    }

    @Test(arguments: [32, 64, 80, 96], [PolicyName.window, .h2o])
    func attentionIsThatOverTheTrueRows(size: Int, policy: PolicyName) throws {
        let cache = try cache(policy)
        let dense = H2OKVCache(try H2OConfiguration(.init(64, sinkSize: 2), policy: .init(policy)))
        for (index, length) in lengths.enumerated() {
            let rows = tokens(length, size, index)
            let output = try step(cache, rows)
            _ = try step(dense, rows)
            let (keys, values) = (try #require(cache.keys), try #require(cache.values))
            #expect((keys.dim(3), values.dim(3)) == (size, size))
            let before = keys.dim(2) - length
            func read(_ stored: MLXArray, _ came: MLXArray) -> MLXArray {
                guard length > maxDecodeQueries else { return stored }
                return concatenated([stored[0..., 0..., ..<before], came], axis: 2)
            }
            let expected = MLXFast.scaledDotProductAttention(
                queries: rows[0], keys: read(keys, rows[1]), values: read(values, rows[2]),
                scale: 0.2, mask: length > 1 ? .causal : .none)
            #expect(furthest(output, expected) < 1e-4)
            #expect(furthest(keys, try #require(dense.keys)) < 0.1)
            if policy == .h2o {
                // The logits of true keys, but for their codes; the shift alone is up to 10.
                #expect(
                    furthest(try #require(cache.scores), try #require(dense.scores)) < 0.1)
            }
        }
    }

    @Test func lessIsLostOfKeysWithABias() throws {
        let caches = try [true, false].map { try cache(.window, kvFrame: $0) }
        let rows = tokens(40, 32, 5)
        let errors = try caches.map { cache in
            _ = try step(cache, rows)
            return furthest(try #require(cache.keys), rows[1])
        }
        #expect(errors[0] < errors[1] / 2)
    }

    /// The first value of a head is the centre of its values if it is small, and so has no error.
    @Test(arguments: [32, 80]) func smallFirstValuesHaveNoError(size: Int) throws {
        let cache = try cache(.window)
        let values = tokens(70, size, 0)[2]
        let given = [tokens(70, size, 0), tokens(1, size, 9)]
        for rows in given { _ = try step(cache, rows) }
        let (stored, centre) = (try #require(cache.values), cache.state[7])
        let first = values.rows(upTo: 1).asType(.bfloat16).asType(.float32)
        #expect(centre.shape == [1, 2, 1, size])
        #expect(furthest(centre[0..., 0..<1], first[0..., 0..<1]) == 0)
        #expect(furthest(centre[0..., 1...], .zeros([1, 1, 1, size], dtype: .float32)) == 0)
        let lost = (0..<2).map { head in
            furthest(stored[0..., head..<head + 1, ..<1], values[0..., head..<head + 1, ..<1])
        }
        #expect(lost[0] < 1e-4)
        #expect(lost[1] > 1e-3)
    }

    /// Earlier versions centred keys alone: zeros stand for what their files and states lack.
    @Test(arguments: [32, 80]) func rowsOfEarlierVersionsAreRead(size: Int) throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let (cache, stated) = (try cache(.keydiff, rows: 16), try self.cache(.keydiff, rows: 16))
        for one in [cache, stated] { _ = try step(one, tokens(9, size, 1)) }
        stated.state = Array(cache.state[..<7] + cache.state[8...])
        try H2OKVCache.save([cache], to: url)
        var (arrays, texts) = try contents(of: url)
        arrays["0.1.3"] = nil
        texts["0.mlx_h2o"] = #"{"format": 5, "layers": 1}"#
        arrays["0.8"] = settings(arrays["0.8"], withValueSize: size)
        try save(arrays: arrays, metadata: texts, url: url)
        let read = try #require(try H2OKVCache.load(from: url).caches[0] as? H2OKVCache)
        for index in 0..<20 {
            let rows = tokens(1, size, 50 + index)
            let outputs = try [cache, read, stated].map { try step($0, rows).asArray(Float.self) }
            #expect(outputs[0] == outputs[1])
            #expect(outputs[0] == outputs[2])
        }
    }

    @Test(arguments: [32, 80]) func filesAndStatesHaveTheFrame(size: Int) throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let cache = try cache(.keydiff, rows: 16)
        for (index, length) in lengths.enumerated() {
            _ = try step(cache, tokens(length, size, index))
        }
        try H2OKVCache.save([cache], to: url)
        let read = try #require(try H2OKVCache.load(from: url).caches[0] as? H2OKVCache)
        #expect(read.configuration == cache.configuration)
        #expect(cache.state.count == 10)
        let copy = try #require(cache.copy() as? H2OKVCache)
        for index in 0..<8 {
            let rows = tokens(1, size, 50 + index)
            let outputs = try [cache, read, copy].map { try step($0, rows).asArray(Float.self) }
            #expect(outputs[0] == outputs[1])
            #expect(outputs[0] == outputs[2])
        }
        for index in [3, 7] {
            var state = cache.state
            state[index] = state[index][0..., ..<1]
            #expect(throws: MLXError.self) { try withError { copy.state = state } }
        }
    }

    /// Settings of packed rows that name no frame are older than frames.
    @Test func settingsWithoutTheNameAreOfPlainRows() throws {
        for (configuration, kvFrame) in [
            (try H2OConfiguration(.init(), .affine(8)), true),
            (try H2OConfiguration(.init(), .affine(8, isFramed: false)), false),
            (try H2OConfiguration(), false),
        ] {
            #expect(configuration.format.isFramed == kvFrame)
            let text = try JSONEncoder().encode(configuration)
            #expect(String(decoding: text, as: UTF8.self).contains("kv_frame") == kvFrame)
            #expect(
                try JSONDecoder().decode(H2OConfiguration.self, from: text) == configuration)
        }
    }
}
