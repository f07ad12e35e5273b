import MLX
import MLXH2O
import MLXLMCommon
import Testing

@testable import MLXH2OLM

@Suite struct EvictionTests {
    /// Never more than `maxKVSize` rows, the protected ones among them, the newest in the last slot;
    /// a group goes when there is no room, and as many rows come before the next one goes.
    @Test(arguments: [1, 4, 16], [PolicyName.keydiff, .h2oEma, .h2o])
    func rowsLeaveInGroups(every: Int, policy: PolicyName) throws {
        let configuration = try H2OConfiguration(
            .init(24, sinkSize: 3, heavySize: 9, evictEvery: every), policy: .init(policy))
        let tokens = Tokens(count: 90, seed: 2)
        let cache = H2OKVCache(configuration)
        // 10 rows are not protected when a token comes.
        let group = min(every, 10)
        var size = 0
        for token in 0..<90 {
            eval(attend(tokens, token..<token + 1, cache))
            size = size == 24 ? 24 - group + 1 : size + 1
            #expect((cache.size, cache.offset) == (size, token + 1))
            #expect(cache.evicted == token + 1 - size)
            let slots = try #require(cache.positions).asArray(Int32.self).map { Int($0) }
            let expected = Set(0..<min(3, token + 1)).union(max(0, token - 11)...token)
            for head in [slots[..<size], slots[size...]] {
                #expect(head.last == token)
                #expect(Set(head).count == size)
                #expect(expected.isSubset(of: head))
            }
        }
    }

    /// A chunk is appended whole and cut down at the next occasion, not before.
    @Test func theSurplusOfAChunkGoesLate() throws {
        let configuration = try H2OConfiguration(
            .init(16, sinkSize: 2, heavySize: 8, evictEvery: 16))
        let tokens = Tokens(count: 60, seed: 9)
        let cache = H2OKVCache(configuration)
        let sizes = [10, 30, 1, 5, 12, 1, 1].map { length in
            let range = cache.offset..<cache.offset + length
            eval(attend(tokens, range, cache))
            return cache.size
        }
        // 9 rows are not protected when a token comes: they are a group.
        #expect(sizes == [10, 40, 8, 13, 25, 8, 9])
    }

    /// What is there is looked at and not changed; ``H2OKVCache/flush()`` lets the surplus go.
    @Test(arguments: [nil, 8]) func onlyFlushLetsRowsGo(kvBits: Int?) throws {
        let configuration = try H2OConfiguration(
            .init(16, sinkSize: 2, heavySize: 8),
            .named(kvBits: kvBits, isFramed: false, groupSize: 32))
        let tokens = Tokens(count: 30, seed: 9)
        let cache = evictingCache(configuration)
        _ = attend(tokens, 0..<30, cache)
        for _ in 0..<2 {
            #expect((cache.size, cache.evicted, cache.offset) == (30, 0, 30))
            #expect(cache.nbytes == 2 * 30 * (kvBits == nil ? 256 : 80))
            #expect(cache.state.allSatisfy { $0.dim(2) == 30 })
            #expect(cache.scores?.dim(2) == 30)
            #expect(cache.keys?.dim(2) == 30)
            #expect(cache.values?.dim(2) == 30)
            #expect(!cache.isTrimmable)
            #expect(sortedPositions(cache.positions) == [Array(0..<30), Array(0..<30)])
        }
        try cache.flush()
        let kept = sortedPositions(cache.positions)
        #expect((cache.size, cache.evicted, cache.offset) == (16, 14, 30))
        #expect(kept.allSatisfy { Set([0, 1] + Array(24..<30)).isSubset(of: $0) })
        try cache.flush()
        #expect(sortedPositions(cache.positions) == kept)
        #expect(cache.evicted == 14)
    }

    /// While a text is short each head may have more rows; their memory goes when the rows do.
    @Test func rowsFollowTheText() throws {
        let settings = try H2OConfiguration(
            .init(12, evictEvery: 1, rowsAt: [[20, 20], [30, 16]]))
        let cache = H2OKVCache(settings)
        let tokens = Tokens(count: 40, seed: 9)
        for (upTo, rows) in [(20, 20), (21, 16), (30, 16), (31, 12), (40, 12)] {
            decode(tokens, cache.offset..<upTo, cache)
            #expect(cache.size == rows)
            #expect(cache.table?.tail.keys.capacity == rows)
        }
    }

    @Test func flushWaitsForScores() throws {
        let (_, keys, values) = Tokens(count: 20, seed: 9).slice(0..<20)
        let cache = H2OKVCache(try small())
        _ = try cache.append(keys: keys, values: values)
        #expect(throws: H2OError.self) { try cache.flush() }
        try cache.accumulate(MLXArray.zeros([1, 4, 1, 20], dtype: .float32))
        try cache.flush()
        #expect(cache.size == 8)
    }

    /// Rows from behind fill the holes, of every column; no other row moves.
    @Test(arguments: [1, 3, 7, 11]) func holesAreFilledFromBehind(gone: Int) throws {
        let tokens = Tokens(count: 12, seed: 7)
        let (_, keys, values) = tokens.slice(0..<12)
        var table = try RowTable(emptyFor: keys, values, .dense, owner: "")
        try table.append(keys, values, offset: 0, limit: 20)
        let ranks = MLXRandom.normal([1, 2, 12], dtype: .float32, key: MLXRandom.key(UInt64(gone)))
        let slots = try keepIndices(ranks, positions: table.positions, keep: 12 - gone)
        let gathered = takeAlong(table.positions, slots, axis: 2)
        table.fillHoles(keeping: slots)
        #expect(table.length == 12 - gone)
        #expect(sortedPositions(table.positions) == sortedPositions(gathered))
        let positions = table.positions.asArray(Int32.self)
        let stayed = gathered.asArray(Int32.self)
        for (at, position) in positions.enumerated() {
            let (head, slot) = (at / (12 - gone), at % (12 - gone))
            let ofHead = stayed[head * (12 - gone)..<(head + 1) * (12 - gone)]
            #expect(Int(position) == slot || !ofHead.contains(Int32(slot)))
        }
        let wide = broadcast(
            table.positions.expandedDimensions(axis: -1), to: [1, 2, 12 - gone, 32])
        let dense = try table.dense()
        for (found, all) in [(dense.keys, keys), (dense.values, values)] {
            #expect(
                found.asArray(Float.self) == takeAlong(all, wide, axis: 2).asArray(Float.self))
        }
    }

    /// Budgets of which everything goes at once, and of which nothing is protected.
    @Test(arguments: [1, 3], [0, 1]) func everythingMayGo(rows: Int, recent: Int) throws {
        let cache = H2OKVCache(
            try H2OConfiguration(
                .init(rows, sinkSize: 0, heavySize: rows - recent, evictEvery: 16), policy: .window)
        )
        let tokens = Tokens(count: 9, seed: 4)
        for token in 0..<9 {
            let (_, keys, values) = tokens.slice(token..<token + 1)
            _ = try cache.append(keys: keys, values: values)
            #expect(sortedPositions(cache.positions)[0] == Array(token - token % rows...token))
        }
    }

    /// Sinks stay where no row is recent, however large a group may be.
    @Test func sinksStayWithoutAWindow() throws {
        let cache = H2OKVCache(
            try H2OConfiguration(
                .init(6, sinkSize: 2, heavySize: 4, evictEvery: 16), policy: .window))
        let tokens = Tokens(count: 9, seed: 4)
        for token in 0..<9 {
            let (_, keys, values) = tokens.slice(token..<token + 1)
            _ = try cache.append(keys: keys, values: values)
        }
        #expect(sortedPositions(cache.positions)[0] == [0, 1, 6, 7, 8])
    }
}
