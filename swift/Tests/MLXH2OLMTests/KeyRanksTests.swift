import MLX
import MLXH2O
import Testing

@testable import MLXH2OLM

/// keydiff's ranks in the pass of attention against a second read of the keys.
@Suite struct KeyRanksTests {
    private func cache(
        secondReadBytes: Int, kvBits: Int? = nil, rows: Int = 16, evictEvery: Int = 1
    ) throws -> H2OKVCache {
        let cache = evictingCache(
            try H2OConfiguration(
                maxKVSize: rows, sinkSize: 2, heavySize: rows / 2, policy: .keydiff,
                evictEvery: evictEvery, kvBits: kvBits, kvGroupSize: 32))
        cache.secondReadBytes = secondReadBytes
        return cache
    }

    private func feed(
        _ tokens: Tokens, _ range: Range<Int>, _ cache: H2OKVCache, _ dtype: DType = .float32
    ) throws -> MLXArray {
        let (queries, keys, values) = tokens.slice(range)
        return try withError {
            let output = MLXH2OLM.attentionWithCacheUpdate(
                queries: queries.asType(dtype), keys: keys.asType(dtype),
                values: values.asType(dtype), cache: cache, scale: 0.25,
                mask: range.count > 1 ? .causal : .none)
            eval(output)
            return output
        }
    }

    /// Chunks and single tokens: the same rows, whichever read ranks them.
    @Test(
        arguments: [DType.float32, .float16, .bfloat16], [Backend.native, .composed])
    func oneReadKeepsWhatTwoKeep(dtype: DType, backend: Backend) throws {
        let tokens = Tokens(count: 260, seed: 31)
        let (one, two) = (try cache(secondReadBytes: 0), try cache(secondReadBytes: .max))
        var start = 0
        try withBackend(backend) {
            for length in [7] + Array(repeating: 1, count: 100) + [3]
                + Array(repeating: 1, count: 60) + [20] + Array(repeating: 1, count: 60)
            {
                let range = start..<start + length
                start += length
                let outputs = try [one, two].map { try feed(tokens, range, $0, dtype) }
                #expect(sortedPositions(one.positions) == sortedPositions(two.positions))
                let pairs = zip(
                    outputs[0].asArray(Float.self), outputs[1].asArray(Float.self))
                #expect(pairs.allSatisfy { abs($0 - $1) < (dtype == .float32 ? 1e-5 : 0.05) })
            }
        }
        #expect(one.store?.areRanked == true)
        #expect(two.store?.areRanked == false)
    }

    /// Rows that go in groups: those that attention ranked, with sums that follow what comes and
    /// goes, are those of a second read.
    @Test(arguments: [2, 5], [nil, 8])
    func groupsAreRankedInOneRead(every: Int, kvBits: Int?) throws {
        let tokens = Tokens(count: 300, seed: 38)
        let one = try cache(secondReadBytes: 0, kvBits: kvBits, evictEvery: every)
        let two = try cache(secondReadBytes: .max, kvBits: kvBits, evictEvery: every)
        var (start, ranked, followed) = (0, 0, 0)
        for length in Array(repeating: 1, count: 120) + [4, 1, 1, 12]
            + Array(repeating: 1, count: 100)
        {
            _ = try feed(tokens, start..<start + length, one)
            let (_, keys, values) = tokens.slice(start..<start + length)
            // Without attention: a second read for packed rows too.
            _ = try two.append(keys: keys, values: values)
            start += length
            #expect(sortedPositions(one.positions) == sortedPositions(two.positions))
            if one.store?.areRanked == true { ranked += 1 }
            followed = max(followed, one.store?.keyRanks?.replaced ?? 0)
        }
        #expect(ranked > 200 / every / 2)
        #expect(followed > 80)
        let known = try #require(one.store?.keyRanks)
        #expect(two.store?.keyRanks == nil)
        guard kvBits == nil else { return }
        let whole = try known.withAppended(to: try #require(one.store)).statistics
        let fresh = try keyStatistics(try #require(one.keys))
        for (one, other) in zip(whole.arrays, fresh.arrays) {
            let pairs = zip(one.asArray(Float.self), other.asArray(Float.self))
            #expect(pairs.allSatisfy { abs($0 - $1) < 1e-5 })
        }
    }

    /// As near as float32, in half precision too: the mean goes in as two probes.
    @Test(arguments: [DType.float32, .float16, .bfloat16], [nil, 8])
    func theRanksAreThoseOfTheKeys(dtype: DType, kvBits: Int?) throws {
        let tokens = Tokens(count: 20, seed: 37)
        let cache = try cache(secondReadBytes: 0, kvBits: kvBits)
        for token in 0..<20 { _ = try feed(tokens, token..<token + 1, cache, dtype) }
        var keys = try #require(cache.keys)
        if let packed = (cache as? QuantizedH2OKVCache)?.packedKeys {
            // The kernels dequantise in float32, MLX in the dtype of the scales.
            keys = dequantized(
                packed.words, scales: packed.scales.asType(.float32),
                biases: packed.biases.asType(.float32), groupSize: 32, bits: 8)
        }
        let expected = try keyDiversity(keys).asArray(Float.self)
        let found = try #require(cache.scores).asArray(Float.self)
        #expect(zip(found, expected).allSatisfy { abs($0 - $1) < 2e-5 })
    }

    /// Packed rows are ranked as they are stored; a copy goes on as the cache does.
    @Test(arguments: [nil, Backend.composed])
    func packedRowsAreRankedAsTheyAreStored(backend: Backend?) throws {
        let tokens = Tokens(count: 120, seed: 32)
        let ranked = try cache(secondReadBytes: .max, kvBits: 8)
        let plain = try cache(secondReadBytes: .max, kvBits: 8)
        try withBackend(backend) {
            for token in 0..<80 {
                _ = try feed(tokens, token..<token + 1, ranked)
                // Without attention nothing is ranked but by a second read.
                let (_, keys, values) = tokens.slice(token..<token + 1)
                _ = try plain.append(keys: keys, values: values)
                #expect(sortedPositions(ranked.positions) == sortedPositions(plain.positions))
            }
            let copy = try #require(ranked.copy() as? H2OKVCache)
            for token in 80..<120 {
                for one in [ranked, copy] { _ = try feed(tokens, token..<token + 1, one) }
                #expect(sortedPositions(ranked.positions) == sortedPositions(copy.positions))
            }
        }
        #expect(ranked.store?.areRanked == true)
        #expect(plain.store?.areRanked == false)
    }

    /// The sum and the norms follow the rows: after many steps they are what all keys give.
    @Test func theStatisticsFollowTheRows() throws {
        let tokens = Tokens(count: 200, seed: 33)
        let cache = try cache(secondReadBytes: 0)
        for token in 0..<200 { _ = try feed(tokens, token..<token + 1, cache) }
        let known = try #require(cache.store?.keyRanks)
        #expect(known.replaced == 184)
        let fresh = try keyStatistics(try #require(cache.keys))
        for (one, other) in [
            (known.statistics.keySum, fresh.keySum),
            (known.statistics.inverseNorms, fresh.inverseNorms),
        ] {
            let pairs = zip(one.asArray(Float.self), other.asArray(Float.self))
            #expect(pairs.allSatisfy { abs($0 - $1) < 1e-5 })
        }
    }

    /// After so many replacements the statistics are made from the keys again, and go on.
    @Test func theStatisticsAreMadeAnew() throws {
        let tokens = Tokens(count: 1100, heads: 1, seed: 34)
        let cache = try cache(secondReadBytes: 0, rows: 8)
        var counts: [Int] = []
        for token in 0..<1100 {
            _ = try feed(tokens, token..<token + 1, cache)
            counts.append(cache.store?.keyRanks?.replaced ?? -1)
        }
        #expect(counts.max() == 1023)
        // 8 rows come, then one goes with each token.
        #expect(counts[8 + 1022] == 1023)
        #expect(counts[8 + 1023] == 0)
        #expect(counts[1099] == 1099 - (8 + 1023))
    }

    /// Whatever changes the rows, or what is remembered of them, ends what was known.
    @Test func whatWasKnownEndsWithTheRows() throws {
        let tokens = Tokens(count: 60, seed: 35)
        let cache = try cache(secondReadBytes: 0)
        for token in 0..<30 { _ = try feed(tokens, token..<token + 1, cache) }
        #expect(cache.store?.areRanked == true)
        let (_, keys, values) = tokens.slice(30..<31)
        _ = try cache.append(keys: keys, values: values)
        #expect(cache.store?.areRanked == false)
        #expect(cache.store?.keyRanks != nil)
        _ = try cache.append(keys: keys, values: values)
        #expect(cache.store?.keyRanks == nil)
        _ = try feed(tokens, 31..<32, cache)
        #expect(cache.store?.areRanked == true)
        cache.state = cache.state
        #expect(cache.store?.keyRanks == nil)
    }

    /// h2o's attention names the row of the next step, and only for that step.
    @Test func attentionNamesTheNextRow() throws {
        let tokens = Tokens(count: 40, seed: 36)
        let cache = try filled(12, small(), tokens)
        let known = try #require(cache.store?.knownWorst)
        #expect(known.zones == cache.zones(added: 1))
        let before = try #require(cache.positions).asArray(Int32.self)
        let slots = known.slots.asArray(UInt32.self).map { Int($0) }
        let (_, keys, values) = tokens.slice(12..<13)
        _ = try cache.append(keys: keys, values: values)
        #expect(cache.store?.knownWorst == nil)
        let after = try #require(cache.positions).asArray(Int32.self)
        let changed = before.indices.filter { before[$0] != after[$0] }
        #expect(changed == [slots[0], 8 + slots[1]])
        let young = try filled(5, small(), tokens)
        #expect(young.store?.knownWorst == nil)
    }
}
