import Foundation
import MLX
import MLXH2O
import MLXH2OLM
import MLXLMCommon
import Testing

/// KV heads of a layer with budgets of their own: two caches that are one to the model.
@Suite struct HeadGroupsTests {
    /// By hand: the same rows, outputs and evictions as of two caches and two attentions.
    @Test(arguments: PolicyName.allCases, [nil, "8 bits", "codes"])
    func eachGroupIsACacheOfItsHeads(policy: PolicyName, kind: String?) throws {
        let settings = try H2OConfiguration(
            .init(12, sinkSize: 2),
            .named(
                kvBits: kind == "8 bits" ? 8 : nil, groupSize: 32,
                kvFormat: kind == "codes" ? "turbo3" : nil), policy: .init(policy))
        let groups = try #require(
            evictingCache(settings, rows: [12, 20, 12]) as? HeadGroupsKVCache)
        #expect(groups.heads == [[0, 2], [1]])
        let alone = try [12, 20].map { evictingCache(try settings.with(maxKVSize: $0)) }
        let tokens = three(60)
        for range in ranges([5, 17, 3] + Array(repeating: 1, count: 20)) {
            let rows = tokens.slice(range)
            let found = try attended(rows.queries, rows.keys, rows.values, groups)
            for (cache, (heads, asking)) in zip(alone, parts) {
                #expect(
                    same(
                        take(found, asking, axis: 1),
                        try attended(rows, heads, asking, cache)))
            }
        }
        for (one, other) in zip(groups.caches, alone) {
            #expect(sortedPositions(one.positions) == sortedPositions(other.positions))
        }
        #expect(groups.caches.map(\.size) == [12, 20])
        #expect(groups.nbytes == alone.reduce(0) { $0 + $1.nbytes })
        #expect((groups.offset, groups.size) == (45, 20))
    }

    @Test(arguments: [[[0, 2], [1]], [[0, 1], [2]], [[1], [0, 2]], [[2], [1], [0]]])
    func groupsOfOneBudgetAreTheUngroupedRun(heads: [[Int]]) throws {
        for settings in [
            try small(.keydiff), try small(.h2oEma), try H2OConfiguration(.init(8), .affine(8)),
        ] {
            let plain = evictingCache(settings)
            let groups = try HeadGroupsKVCache(
                heads.map { _ in evictingCache(settings) }, heads: heads)
            let tokens = three(60)
            for range in ranges([16, 3] + Array(repeating: 1, count: 30)) {
                let rows = tokens.slice(range)
                let outputs = try ([plain, groups] as [any KVCache]).map {
                    try attended(rows.queries, rows.keys, rows.values, $0)
                }
                #expect(same(outputs[0], outputs[1]))
            }
            #expect(groups.nbytes == plain.nbytes)
        }
    }

    @Test(arguments: [3, 4]) func masksWithAnAxisOfHeadsAreCut(dimensions: Int) throws {
        let rows = three(6).slice(0..<6)
        var mask = MLXRandom.normal([6, 6, 6], dtype: .float32, key: MLXRandom.key(4))
        if dimensions == 4 { mask = mask.expandedDimensions(axis: 0) }
        let caches: [any KVCache] = [try groups(), H2OKVCache(try H2OConfiguration())]
        let outputs = try caches.map {
            try attended(rows.queries, rows.keys, rows.values, $0, mask: .array(mask))
        }
        #expect(same(outputs[0], outputs[1]))
    }

    /// As of two caches that are given, and lose, the same drafts.
    @Test func draftsComeAndGo() throws {
        let groups = try groups(speculative: 3)
        #expect(groups.isTrimmable && groups.isTrimmable(after: 4))
        #expect(!groups.isTrimmable(after: 5))
        let alone = groups.caches.map { evictingCache($0.configuration) }
        let tokens = three(160)
        for (turn, range) in ranges(Array(repeating: 4, count: 30)).enumerated() {
            let back = [3, 0, 4, 1][turn % 4]
            let rows = tokens.slice(range)
            let found = try attended(rows.queries, rows.keys, rows.values, groups)
            #expect(groups.trim(back) == back)
            for (cache, (heads, asking)) in zip(alone, parts) {
                let expected = try attended(rows, heads, asking, cache)
                #expect(cache.trim(back) == back)
                #expect(same(take(found, asking, axis: 1), expected))
            }
        }
        #expect(groups.offset == alone[0].offset)
        #expect(groups.caches.map(\.size) == alone.map(\.size))
    }

    /// The wide group could, since nothing left it; the narrow one cannot.
    @Test func aTrimThatOneGroupRefusesChangesNothing() throws {
        let cache = try groups()
        try filled(cache, 15)
        #expect(!cache.isTrimmable)
        #expect(throws: MLXError.self) { try withError { #expect(cache.trim(3) == 0) } }
        #expect(cache.caches.map(\.offset) == [15, 15])
        #expect(cache.caches.map(\.size) == [12, 15])
        let below = try groups()
        try filled(below, 9)
        #expect(below.trim(3) == 3)
        #expect(below.trim(30) == 6)
        #expect(below.caches.map(\.offset) == [0, 0])
    }

    @Test func copiesStatesAndFilesHoldEverything() throws {
        for settings in [
            try settings(), try settings(speculative: 3), try settings(.h2o, bits: 8),
            try settings(.h2oEma),
        ] {
            let url = temporaryFile()
            defer { try? FileManager.default.removeItem(at: url) }
            let cache = try groups(settings)
            try filled(cache, 18)
            try H2OKVCache.save(
                [cache, try groups(settings), evictingCache(settings)], to: url,
                metadata: ["of": "heads"])
            let (loaded, metadata) = try H2OKVCache.load(from: url)
            #expect(metadata == ["of": "heads"])
            let read = try #require(loaded[0] as? HeadGroupsKVCache)
            #expect(read.heads == cache.heads)
            #expect(read.caches.map(\.configuration) == cache.caches.map(\.configuration))
            #expect(read.caches.map(\.name) == ["layer 3 KV heads 0, 2", "layer 3 KV heads 1"])
            #expect((loaded[1] as? HeadGroupsKVCache)?.size == 0)
            #expect((loaded[2] as? H2OKVCache)?.size == 0)
            let copy = try #require(cache.copy() as? HeadGroupsKVCache)
            var ones: [any KVCache] = [cache, copy, read]
            if settings.speculative == 0 {
                var stated: any KVCache = try groups(settings)
                stated.state = cache.state
                #expect(stated.offset == 18)
                ones.append(stated)
            }
            for token in 18..<40 {
                let rows = three(60).slice(token..<token + 1)
                let outputs = try ones.map {
                    try attended(rows.queries, rows.keys, rows.values, $0)
                }
                for output in outputs { #expect(same(output, outputs[0])) }
            }
            #expect(cache.innerState().count == cache.caches.flatMap { $0.innerState() }.count)
            cache.state = []
            #expect((cache.offset, cache.size, cache.state.count) == (0, 0, 0))
        }
    }

    /// Groups of an earlier call stay together, whichever of them could not be served.
    @Test func anUpdateThatThrowsChangesNothing() throws {
        let cache = try groups()
        try filled(cache, 15)
        let rows = three(60).slice(15..<17)
        let before = cache.state
        // Fits the rows of the narrow group only.
        let mask = MLXArray.zeros([2, 14], dtype: .float32)
        #expect(throws: MLXError.self) {
            try attended(rows.queries, rows.keys, rows.values, cache, mask: .array(mask))
        }
        #expect(cache.caches.map(\.offset) == [15, 15])
        #expect(zip(cache.state, before).allSatisfy(same))
        _ = try attended(rows.queries, rows.keys, rows.values, cache)
    }

    @Test func aStateThatOneGroupRefusesChangesNothing() throws {
        let (cache, other) = (try groups(), try groups())
        try filled(cache, 9)
        try filled(other, 4)
        var state = other.state
        state[4] = state[4][0..., ..<0]
        #expect(throws: MLXError.self) { try withError { cache.state = state } }
        #expect(cache.caches.map(\.offset) == [9, 9])
        #expect(cache.caches.map(\.size) == [9, 9])
    }

    @Test func whatDoesNotFitIsReportedByName() throws {
        let cache = try groups()
        func message(_ body: () throws -> Void) throws -> String {
            do { try withError { try body() } } catch { return "\(error)" }
            return "nothing"
        }
        let rows = three(9).slice(0..<9)
        for (said, body) in [
            (
                "found 1 caches of the KV heads [[0], [1]]",
                { _ = try HeadGroupsKVCache([cache.caches[0]], heads: [[0], [1]]) }
            ),
            ("found 0 caches", { _ = try HeadGroupsKVCache([], heads: []) }),
            ("[[0, 0], [1]]", { _ = try HeadGroupsKVCache(cache.caches, heads: [[0, 0], [1]]) }),
            ("[[1, 0], [2]]", { _ = try HeadGroupsKVCache(cache.caches, heads: [[1, 0], [2]]) }),
            ("[[0, 3], [1]]", { _ = try HeadGroupsKVCache(cache.caches, heads: [[0, 3], [1]]) }),
            ("[[0, 1], []]", { _ = try HeadGroupsKVCache(cache.caches, heads: [[0, 1], []]) }),
            (
                "layer 3 KV heads 0, 2 and others have KV heads of unequal budgets: expected a model",
                { _ = cache.update(keys: rows.keys, values: rows.values) }
            ),
            (
                "expected returnArray = false",
                { _ = cache.makeMask(n: 2, windowSize: nil, returnArray: true) }
            ),
            (
                "windowSize is 4",
                { _ = cache.makeMask(n: 2, windowSize: 4, returnArray: false) }
            ),
            (
                "expected the 3 KV heads",
                { _ = try attended(rows.queries, rows.queries, rows.queries, cache) }
            ),
            (
                "expected the 3 KV heads",
                {
                    _ = try attended(
                        rows.queries[0..., ..<4, 0..., 0...], rows.keys, rows.values, cache)
                }
            ),
            (
                "expected the 3 KV heads",
                { _ = try attended(rows.queries, rows.keys.squeezed(axis: 0), rows.values, cache) }
            ),
            (
                "values [1, 2, 8, 32]",
                {
                    _ = try attended(
                        rows.queries, rows.keys, rows.values[0..., 0..., ..<8], cache)
                }
            ),
            (
                "the states of 2 groups, each with positions last, found 0 such arrays of 1",
                { cache.state = [rows.keys] }
            ),
            ("expected nothing", { cache.metaState = ["1"] }),
            (
                "asked to take back",
                {
                    try filled(cache, 15)
                    _ = cache.trim(3)
                }
            ),
            (
                "have seen [0, 15] tokens",
                {
                    _ = try HeadGroupsKVCache(
                        [H2OKVCache(settings()), cache.caches[1]], heads: [[0, 2], [1]])
                }
            ),
            (
                "[[0], [1, 2]]",
                { _ = try HeadGroupsKVCache(cache.caches, heads: [[0], [1, 2]]) }
            ),
        ] as [(String, () throws -> Void)] {
            let found = try message(body)
            #expect(found.contains(said))
        }
        guard case .none = cache.makeMask(n: 1, windowSize: nil, returnArray: true),
            case .causal = cache.makeMask(n: 2, windowSize: nil, returnArray: false)
        else { throw Unsaid(description: "masks") }
    }

    @Test func filesThatWereChangedAreRefused() async {
        await #expect(processExitsWith: .success) {
            let url = temporaryFile()
            defer { try? FileManager.default.removeItem(at: url) }
            let cache = try groups()
            try filled(cache, 15)
            try H2OKVCache.save([cache], to: url)
            let (arrays, texts) = try contents(of: url)
            let classes = #""classes": ["H2OKVCache", "H2OKVCache"]"#
            for (part, text) in [
                ("0.0", "{}"), ("0.0", "no JSON"),
                ("0.0", "{\"heads\": [[0], [1, 2]], \(classes)}"),
                ("0.0", "{\"heads\": [[0, 1, 2]], \(classes)}"),
                ("0.0", #"{"heads": [[0, 2], [1]], "classes": ["H2OKVCache", "KVCache"]}"#),
                ("0.0", #"{"heads": [[0, 2], [1]], "classes": ["H2OKVCache"]}"#),
                ("0.0", #"{"heads": [], "classes": []}"#), ("0.1.8", "{}"), ("0.2.4", nil),
                ("0.0", nil), ("0.2.3", nil),
            ] as [(String, String?)] {
                var damaged = arrays
                damaged[part] = text.map { MLXArray($0.unicodeScalars.map { Int32($0.value) }) }
                try save(arrays: damaged, metadata: texts, url: url)
                guard (try? H2OKVCache.load(from: url)) == nil else {
                    throw Unsaid(description: "\(part) \(text ?? "nothing")")
                }
            }
            try save(arrays: arrays, metadata: texts, url: url)
            _ = try H2OKVCache.load(from: url)
        }
    }
}

private struct Unsaid: Error, CustomStringConvertible {
    let description: String
}

/// Six query heads of three KV heads.
private func three(_ count: Int) -> Tokens {
    Tokens(count: count, queryHeads: 6, heads: 3, seed: 3)
}

private func settings(
    _ policy: PolicyName = .keydiff, bits: Int? = nil, speculative: Int = 0
) throws -> H2OConfiguration {
    try H2OConfiguration(
        .init(16, sinkSize: 2, speculative: speculative), .named(kvBits: bits, groupSize: 32),
        policy: .init(policy))
}

/// 12 rows of the heads 0 and 2, 20 of 1.
private func groups(_ settings: H2OConfiguration) throws -> HeadGroupsKVCache {
    let cache = try evictingCache(settings, rows: [12, 20, 12], name: "layer 3")
    return try #require(cache as? HeadGroupsKVCache)
}

private func groups(speculative: Int = 0) throws -> HeadGroupsKVCache {
    try groups(settings(speculative: speculative))
}

/// Tokens one after the other.
private func filled(_ cache: any KVCache, _ count: Int) throws {
    let tokens = three(60)
    for token in 0..<count {
        let rows = tokens.slice(token..<token + 1)
        eval(try attended(rows.queries, rows.keys, rows.values, cache))
    }
}

private typealias Rows = (queries: MLXArray, keys: MLXArray, values: MLXArray)

/// The KV heads of each group, and who asks them.
private var parts: [(heads: MLXArray, asking: MLXArray)] {
    [([0, 2], [0, 1, 4, 5]), ([1], [2, 3])].map {
        (MLXArray($0 as [Int32]), MLXArray($1 as [Int32]))
    }
}

/// Of some heads.
private func attended(
    _ rows: Rows, _ heads: MLXArray, _ asking: MLXArray, _ cache: any KVCache
) throws -> MLXArray {
    try attended(
        take(rows.queries, asking, axis: 1), take(rows.keys, heads, axis: 1),
        take(rows.values, heads, axis: 1), cache)
}

/// Bit for bit, NaN included.
private func same(_ one: MLXArray, _ other: MLXArray) -> Bool {
    let bits = [one, other].map { array in
        array.asType(.float32).asArray(Float.self).map(\.bitPattern)
    }
    return one.shape == other.shape && one.dtype == other.dtype && bits[0] == bits[1]
}

private func ranges(_ lengths: [Int]) -> [Range<Int>] {
    var start = 0
    return lengths.map { length in
        start += length
        return start - length..<start
    }
}
