import Foundation
import MLX
import MLXH2O
import MLXH2OLM
import MLXLMCommon
import Testing

/// Trimming, masks, copies, and what is saved.
@Suite struct StateTests {
    @Test func trimmableUntilTheFirstEviction() throws {
        let tokens = Tokens(count: 20, seed: 3)
        let cache = try filled(6, small(), tokens)
        #expect(cache.isTrimmable)
        #expect(cache.isTrimmable(after: 2))
        #expect(!cache.isTrimmable(after: 3))
        #expect(cache.trim(2) == 2)
        #expect(cache.offset == 4)
        #expect(sortedPositions(cache.positions)[0] == [0, 1, 2, 3])
        for token in 4..<9 { _ = attend(tokens, token..<token + 1, cache) }
        #expect(!cache.isTrimmable)
        #expect(!cache.isTrimmable(after: 0))
        #expect(throws: MLXError.self) { try withError { cache.trim(1) } }
        #expect(cache.offset == 9)
    }

    @Test func masksCoverTheRowsOfTheNextUpdate() throws {
        let tokens = Tokens(count: 20, seed: 3)
        let cache = try filled(12, small(), tokens)
        guard case .none = cache.makeMask(n: 1, windowSize: nil, returnArray: true),
            case .causal = cache.makeMask(n: 3, windowSize: nil, returnArray: false),
            case .array(let mask) = cache.makeMask(n: 3, windowSize: nil, returnArray: true)
        else {
            Issue.record("another kind of mask")
            return
        }
        #expect(mask.shape == [3, 11])
        #expect(
            mask[0..., 8...].asArray(Bool.self)
                == [true, false, false, true, true, false, true, true, true])
    }

    /// The surplus of a chunk goes before the rows that the mask is for are appended.
    @Test func masksLeaveTheSurplusOut() throws {
        let tokens = Tokens(count: 20, seed: 3)
        let cache = H2OKVCache(try small())
        eval(attend(tokens, 0..<12, cache, mask: .causal))
        let mode = cache.makeMask(n: 3, windowSize: nil, returnArray: true)
        let mask = try #require(mode.mask)
        let output = try withError { attend(tokens, 12..<15, cache, mask: mode) }
        #expect(mask.shape == [3, 11])
        #expect(output.shape == [1, 4, 3, 32])
    }

    @Test func copiesAreIndependent() throws {
        let tokens = Tokens(count: 30, seed: 3)
        let cache = try filled(12, small(), tokens)
        let copy = try #require(cache.copy() as? H2OKVCache)
        let before = try #require(cache.keys).asArray(Float.self)
        for token in 12..<20 { eval(attend(tokens, token..<token + 1, cache)) }
        #expect(copy.offset == 12)
        #expect(try #require(copy.keys).asArray(Float.self) == before)
        for token in 12..<20 { eval(attend(tokens, token..<token + 1, copy)) }
        #expect(sortedPositions(copy.positions) == sortedPositions(cache.positions))
    }

    @Test func bytesAreAllCounted() throws {
        let cache = try filled(12, small(), Tokens(count: 12, seed: 3))
        // Keys, values, scores and positions.
        #expect(cache.nbytes == 2 * 8 * (32 * 4 + 32 * 4 + 4 + 4))
    }

    @Test func filesHoldEverything() throws {
        let url = FileManager.default.temporaryDirectory
            .appending(path: "mlx-h2o-\(UUID().uuidString).safetensors")
        defer { try? FileManager.default.removeItem(at: url) }
        let tokens = Tokens(count: 40, seed: 3)
        let cache = try filled(20, small(), tokens)
        let empty = H2OKVCache(try small(.keydiff))
        try H2OKVCache.save([cache, empty], to: url, metadata: ["model": "demo"])
        let (loaded, metadata) = try H2OKVCache.load(from: url)
        #expect(metadata == ["model": "demo"])
        #expect(loaded.map(\.configuration) == [cache.configuration, empty.configuration])
        #expect(loaded[0].name == "layer 3")
        #expect(loaded[1].keys == nil)
        for token in 20..<40 {
            for one in [cache, loaded[0]] { eval(attend(tokens, token..<token + 1, one)) }
        }
        #expect(sortedPositions(loaded[0].positions) == sortedPositions(cache.positions))
        #expect(loaded[0].evicted == cache.evicted)
        #expect(!loaded[0].isTrimmable)
    }

    @Test func otherFilesAreRefused() throws {
        let url = FileManager.default.temporaryDirectory
            .appending(path: "mlx-h2o-\(UUID().uuidString).safetensors")
        defer { try? FileManager.default.removeItem(at: url) }
        #expect(throws: H2OError.self) { try H2OKVCache.save([KVCacheSimple()], to: url) }
        try save(arrays: ["a": MLXArray(Float(1))], url: url)
        #expect(throws: H2OError.self) { try H2OKVCache.load(from: url) }
        let cache = try filled(3, small(), Tokens(count: 3, seed: 1))
        try H2OKVCache.save([cache], to: url)
        let whole = try Data(contentsOf: url)
        try whole.prefix(whole.count / 2).write(to: url)
        #expect(throws: (any Error).self) { try H2OKVCache.load(from: url) }
    }

    @Test func stateThatDoesNotFitIsReported() throws {
        let cache = H2OKVCache(try small())
        let one = MLXArray.zeros([1, 2, 3, 4], dtype: .float32)
        #expect(throws: MLXError.self) { try withError { cache.state = [one, one] } }
        #expect(throws: MLXError.self) { try withError { cache.metaState = ["1"] } }
        #expect(cache.keys == nil)
    }
}
