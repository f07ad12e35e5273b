import Cmlx
import MLX
import MLXH2O
import MLXH2OLM
import MLXLMCommon
import Testing

/// A cache of someone else that wants scores.
private final class Recorder: H2OScoreTracking {
    var inner = KVCacheSimple()
    var shapes: [[Int]] = []

    let needsScores = true
    let trackedState: [MLXArray] = []
    var offset: Int { inner.offset }
    let maxSize: Int? = nil
    var state: [MLXArray] = []
    var metaState: [String] = []
    let isTrimmable = false

    func innerState() -> [MLXArray] { inner.innerState() }
    func trim(_ n: Int) -> Int { 0 }
    func copy() -> any KVCache { self }

    func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        inner.update(keys: keys, values: values)
    }

    func updateScores(_ scores: MLXArray, isMasked: Bool) {
        shapes.append(scores.shape)
    }

    func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        inner.makeMask(n: n, windowSize: windowSize, returnArray: returnArray)
    }
}

@Suite struct RoutingTests {
    @Test func otherCachesAreForwarded() {
        let tokens = Tokens(count: 6, seed: 1)
        let (ours, theirs) = (KVCacheSimple(), KVCacheSimple())
        for range in [0..<4, 4..<5, 5..<6] {
            let (queries, keys, values) = tokens.slice(range)
            let found = attend(tokens, range, ours)
            let expected = MLXLMCommon.attentionWithCacheUpdate(
                queries: queries, keys: keys, values: values, cache: theirs, scale: 0.25,
                mask: range.count > 1 ? .causal : .none)
            #expect(found.asArray(Float.self) == expected.asArray(Float.self))
        }
        #expect(ours.offset == 6)
        let alone = attend(tokens, 0..<1, nil)
        #expect(alone.shape == [1, 4, 1, 32])
    }

    @Test func anyTrackingCacheGetsScores() {
        let tokens = Tokens(count: 200, seed: 1)
        let cache = Recorder()
        for range in [0..<150, 150..<158, 158..<159] {
            eval(attend(tokens, range, cache))
        }
        #expect(cache.shapes == [[1, 4, 128, 150], [1, 4, 8, 158], [1, 4, 1, 159]])
    }

    /// What a long chunk leaves behind is what the whole matrix of its scores would.
    @Test(arguments: [9, 128, 131]) func longChunksAreScoredByTheirLastQueries(length: Int) throws {
        let tokens = Tokens(count: length, seed: 6)
        let configuration = try H2OConfiguration(.init(256), policy: .h2oEma)
        let (cache, other) = (H2OKVCache(configuration), H2OKVCache(configuration))
        let (queries, keys, values) = tokens.slice(0..<length)
        let found = attend(tokens, 0..<length, cache)
        _ = try other.append(keys: keys, values: values)
        let (output, scores) = try withBackend(.composed) {
            try MLXFast.scaledDotProductAttentionWithScores(
                queries: queries, keys: keys, values: values, scale: 0.25, mask: .causal)
        }
        try other.accumulate(scores)
        #expect(furthest(found, output) < 1e-5)
        #expect(furthest(try #require(cache.scores), try #require(other.scores)) < 1e-5)
    }

    /// An array mask, of all queries or broadcast over them, says the same as the causal mode.
    @Test func arrayMasksFollowTheLastQueries() throws {
        let tokens = Tokens(count: 140, seed: 8)
        let configuration = try H2OConfiguration(.init(256), policy: .h2oEma)
        let caches = [H2OKVCache(configuration), H2OKVCache(configuration)]
        _ = attend(tokens, 0..<140, caches[0])
        _ = attend(tokens, 0..<140, caches[1], mask: .array(createCausalMask(n: 140, offset: 0)))
        let scores = caches.compactMap { $0.scores?.asArray(Float.self) }
        #expect(scores[0] == scores[1])
    }

    @Test func halvesBesideFloatsArePromoted() throws {
        let cache = H2OKVCache(try small())
        let (queries, keys, values) = Tokens(count: 1, seed: 1).slice(0..<1)
        let output = try withError {
            MLXH2OLM.attentionWithCacheUpdate(
                queries: queries.asType(.float16), keys: keys, values: values, cache: cache,
                scale: 1)
        }
        #expect(output.dtype == .float32)
    }

    /// Evaluating the output evaluates scores and positions too: no graph is left over.
    @Test(arguments: PolicyName.allCases) func theOutputCarriesTheState(policy: PolicyName) throws {
        let tokens = Tokens(count: 20, seed: 1)
        let cache = H2OKVCache(try small(policy))
        for token in 0..<20 {
            eval(attend(tokens, token..<token + 1, cache))
            for array in cache.innerState() {
                var available = false
                _mlx_array_is_available(&available, array.ctx)
                #expect(available, "step \(token)")
            }
        }
    }

    /// Between two evictions a row is written into the buffer that is there.
    @Test(arguments: [PolicyName.keydiff, .h2oEma, .window]) func stepsMoveNothing(
        policy: PolicyName
    )
        throws
    {
        let tokens = Tokens(count: 40, seed: 1)
        let cache = H2OKVCache(try small(policy))
        var address: UnsafePointer<Float>?
        var unchanged = 0
        for token in 0..<40 {
            let evicted = cache.evicted
            eval(attend(tokens, token..<token + 1, cache))
            let now = mlx_array_data_float32(cache.innerState()[0].ctx)
            if token >= 10, cache.evicted == evicted, now == address { unchanged += 1 }
            address = now
        }
        // A copy never lands on its source. Now and then MLX still holds the buffer, and copies.
        #expect(unchanged >= 10)
    }
}
