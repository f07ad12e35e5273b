import Foundation
import MLX
import MLXH2O
import MLXH2OLM
import MLXLMCommon
import Testing

/// Trimming, masks, copies, and what is saved.
@Suite struct StateTests {
    /// Who asks only once, as iterators that speculate do, is refused from the start.
    @Test func trimIsExactUntilTheFirstEviction() throws {
        let tokens = Tokens(count: 20, seed: 3)
        let cache = try filled(6, small(), tokens)
        #expect(!cache.isTrimmable)
        #expect(!cache.isTrimmable(after: 1))
        #expect(cache.trim(2) == 2)
        #expect(cache.offset == 4)
        #expect(sortedPositions(cache.positions)[0] == [0, 1, 2, 3])
        decode(tokens, 4..<9, cache)
        #expect(throws: MLXError.self) { try withError { cache.trim(1) } }
        #expect(cache.offset == 9)
    }

    /// Rounds of a token and two guesses, of which one is wrong: across the budget no trace remains.
    @Test func draftsAreTakenBack() throws {
        let tokens = Tokens(count: 90, seed: 3)
        for policy in [PolicyName.h2o, .keydiff, .h2oEma] {
            let settings = try H2OConfiguration(
                .init(12, sinkSize: 2, speculative: 2), policy: .init(policy))
            let cache = H2OKVCache(settings)
            #expect(cache.isTrimmable)
            #expect(cache.isTrimmable(after: 3))
            #expect(!cache.isTrimmable(after: 4))
            for round in 0..<30 {
                eval(attend(tokens, 3 * round..<3 * round + 3, cache))
                let last = try #require(cache.positions)[0..., 0..., (cache.size - 3)...]
                let end = Int32(cache.offset)
                let newest = [end - 3, end - 2, end - 1]
                #expect(last.asArray(Int32.self) == newest + newest)
                #expect(cache.trim(1) == 1)
                #expect(cache.offset == 2 * round + 2)
                #expect(cache.size <= 12)
            }
            #expect(throws: MLXError.self) { try withError { cache.trim(4) } }
            #expect(throws: H2OError.self) { try H2OConfiguration(.init(8, speculative: 3)) }
        }
    }

    /// Rows of tokens before the last four may have gone with the evictions, and are not said to be
    /// there, however many calls ask for them; nor after a file, a copy or a state.
    @Test(arguments: [nil, 8]) func manyTrimsGoNoFurtherThanOne(bits: Int?) throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let tokens = Tokens(count: 60, seed: 3)
        let settings = try H2OConfiguration(
            .init(12, sinkSize: 2, evictEvery: 3, speculative: 3),
            .named(kvBits: bits, groupSize: 32))
        let cache = evictingCache(settings)
        decode(tokens, 0..<40, cache)
        #expect(cache.trim(3) == 3)
        try H2OKVCache.save([cache], to: url)
        let stated = evictingCache(settings)
        stated.state = cache.state
        // Of a row that went with the trim nothing says that there was a newer one.
        let read = try H2OKVCache.load(from: url).caches[0]
        for one in [cache, read, cache.copy(), stated] as [any KVCache] {
            let one = try #require(one as? H2OKVCache)
            #expect(throws: MLXError.self) { try withError { one.trim(2) } }
            #expect(one.offset == 37)
            #expect(one.trim(1) == 1)
            #expect(throws: MLXError.self) { try withError { one.trim(1) } }
            decode(tokens, 40..<43, one)
            #expect(one.trim(3) == 3)
            decode(tokens, 43..<60, one)
            let newest = try #require(one.positions)[0..., 0..., (one.size - 4)...]
            let last = Array(Int32(one.offset - 4)..<Int32(one.offset))
            #expect(newest.asArray(Int32.self) == last + last)
        }
    }

    /// A cache that lost all its tokens again is as a new one, in files too.
    @Test func noRowsAreLeftOfAllTokensTakenBack() throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let tokens = Tokens(count: 20, seed: 3)
        let cache = try filled(3, small(), tokens)
        #expect(cache.trim(3) == 3)
        #expect(cache.state.isEmpty)
        try H2OKVCache.save([cache], to: url)
        let read = try #require(try H2OKVCache.load(from: url).caches[0] as? H2OKVCache)
        for one in [cache, read] {
            decode(tokens, 0..<20, one)
            #expect((one.offset, one.size) == (20, cache.size))
        }
    }

    /// What a state does not say, the cache that it is given back to knows.
    @Test func statesGoBackToTheirCache() throws {
        let rows = MLXRandom.normal([1, 2, 3, 80], dtype: .float32, key: MLXRandom.key(1))
        let half = rows[.ellipsis, ..<64].asType(.float16)
        for (format, rows) in [
            (H2OConfiguration.Format.codes(.turbo3), half), (.affine(8), rows), (.dense, half),
            (.codes(.turbo0v4), half),
        ] {
            let cache = evictingCache(try H2OConfiguration(.init(), format))
            _ = try cache.append(keys: rows, values: rows)
            let before = cache.state
            _ = try cache.append(keys: rows, values: rows)
            cache.state = before
            #expect((cache.offset, cache.size) == (3, 3))
            _ = try cache.append(keys: rows, values: rows)
            #expect(try #require(cache.values).shape == [1, 2, 6, rows.dim(3)])
            guard format == .codes(.turbo0v4) else { continue }
            let other = evictingCache(try H2OConfiguration(.init(), format))
            other.state = before  // keys say of which dtype the codes are
            _ = try other.append(keys: rows, values: rows)
        }
    }

    /// Rows of a state have been attended to, whatever the cache waited for.
    @Test func statesEndTheWaitForScores() throws {
        let (_, keys, values) = Tokens(count: 3, seed: 3).slice(0..<3)
        let cache = H2OKVCache(try small())
        for state in [[], try filled(5, small(), Tokens(count: 5, seed: 3)).state] {
            _ = try cache.append(keys: keys, values: values)
            cache.state = state
        }
        _ = try cache.append(keys: keys, values: values)
        #expect(cache.offset == 8)
    }

    @Test func aPolicyOfAnAppRanks() throws {
        /// The oldest rows stay.
        struct Oldest: EvictionPolicy {
            func rank(_ rows: PolicyRows) -> MLXArray { -rows.positions.asType(.float32) }
        }
        /// The importance of another shape.
        struct Wrong: EvictionPolicy {
            let needsScores = true
            func rank(_ rows: PolicyRows) -> MLXArray { rows.importance }
            func accumulate(
                _ importance: MLXArray, scores: MLXArray, positions: MLXArray, isMasked: Bool
            ) throws -> MLXArray { importance[0..., 0..., ..<0] }
        }
        let tokens = Tokens(count: 30, seed: 3)
        let settings = try H2OConfiguration(.init(8, sinkSize: 0, heavySize: 7))
        let cache = H2OKVCache(settings, policy: Oldest())
        decode(tokens, 0..<30, cache)
        #expect(sortedPositions(cache.positions)[0] == [0, 1, 2, 3, 4, 5, 6, 29])
        let copy = try #require(cache.copy() as? H2OKVCache)
        _ = attend(tokens, 0..<1, copy)
        #expect(sortedPositions(copy.positions)[0] == [0, 1, 2, 3, 4, 5, 6, 30])
        let url = FileManager.default.temporaryDirectory.appending(path: "own.safetensors")
        let error = #expect(throws: H2OError.self) { try H2OKVCache.save([cache], to: url) }
        #expect(error?.description.contains("evicts by Oldest") == true)
        let wrong = H2OKVCache(settings, policy: Wrong())
        #expect(throws: MLXError.self) { try withError { attend(tokens, 0..<1, wrong) } }
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
        eval(attend(tokens, 0..<12, cache))
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
        decode(tokens, 12..<20, cache)
        #expect(copy.offset == 12)
        #expect(try #require(copy.keys).asArray(Float.self) == before)
        decode(tokens, 12..<20, copy)
        #expect(sortedPositions(copy.positions) == sortedPositions(cache.positions))
    }

    @Test func bytesAreAllCounted() throws {
        let cache = try filled(12, small(), Tokens(count: 12, seed: 3))
        // Keys, values and scores; positions of the 6 rows that the last eviction left.
        #expect(cache.nbytes == 2 * (8 * (32 * 4 + 32 * 4 + 4) + 6 * 4))
        #expect(cache.nbytes == cache.innerState().reduce(0) { $0 + $1.nbytes })
    }

    @Test func filesHoldEverything() throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let tokens = Tokens(count: 40, seed: 3)
        let cache = try filled(20, small(), tokens)
        let empty = H2OKVCache(try small(.keydiff))
        try H2OKVCache.save([cache, empty], to: url, metadata: ["model": "demo"])
        let file = try FileManager.default.attributesOfItem(atPath: url.path)
        #expect(file[.posixPermissions] as? Int == 0o600)
        let (read, metadata) = try H2OKVCache.load(from: url)
        let loaded = read.compactMap { $0 as? H2OKVCache }
        #expect(metadata == ["model": "demo"])
        #expect(loaded.map(\.configuration) == [cache.configuration, empty.configuration])
        #expect(loaded[0].name == "layer 3")
        #expect(loaded[1].keys == nil)
        for one in [cache, loaded[0]] { decode(tokens, 20..<40, one) }
        #expect(sortedPositions(loaded[0].positions) == sortedPositions(cache.positions))
        #expect(loaded[0].evicted == cache.evicted)
        #expect(!loaded[0].isTrimmable)
    }

    @Test func otherFilesAreRefused() throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        #expect(throws: H2OError.self) { try H2OKVCache.save([KVCacheSimple()], to: url) }
        try save(arrays: ["a": MLXArray(Float(1))], url: url)
        #expect(throws: H2OError.self) { try H2OKVCache.load(from: url) }
        let cache = try filled(3, small(), Tokens(count: 3, seed: 1))
        try H2OKVCache.save([cache], to: url)
        let (arrays, texts) = try contents(of: url)
        let whole = try Data(contentsOf: url)
        // Of mlx_lm's, or of a batch, which have other parts.
        for name in ["KVCache", "BatchH2OKVCache"] {
            let some = arrays.filter { ["0.0", "0.1"].contains($0.key) }
            try save(arrays: some, metadata: texts.merging(["1.0": name]) { $1 }, url: url)
            let error = #expect(throws: H2OError.self) { try H2OKVCache.load(from: url) }
            #expect(error?.description.contains("layer 0 is a \(name), expected") == true)
        }
        try whole.prefix(whole.count / 2).write(to: url)
        #expect(throws: (any Error).self) { try H2OKVCache.load(from: url) }
    }

    /// Of a cache without rows, a file may still name queries that saw some.
    @Test func scoresWithoutRowsAreRefused() throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let settings = try H2OConfiguration(.init(12, speculative: 2), policy: .h2o)
        try H2OKVCache.save([H2OKVCache(settings)], to: url)
        let (arrays, texts) = try contents(of: url)
        let seen = ["0.9": MLXArray.zeros([0, 1, 0, 0], dtype: .float32)]
        try save(arrays: arrays.merging(seen) { $1 }, metadata: texts, url: url)
        #expect(throws: H2OError.self) { try H2OKVCache.load(from: url) }
    }

    @Test func stateThatDoesNotFitIsReported() throws {
        let cache = H2OKVCache(try small())
        let one = MLXArray.zeros([1, 2, 3, 4], dtype: .float32)
        #expect(throws: MLXError.self) { try withError { cache.state = [one, one] } }
        #expect(throws: MLXError.self) { try withError { cache.metaState = ["1"] } }
        #expect(cache.keys == nil)
    }
}
