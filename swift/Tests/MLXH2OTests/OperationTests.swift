import Foundation
import MLX
import MLXH2O
import Testing

private func normal(_ shape: [Int], _ seed: UInt64, _ dtype: DType = .float32) -> MLXArray {
    MLXRandom.normal(shape, dtype: .float32, key: MLXRandom.key(seed)).asType(dtype)
}

private func pack(_ rows: MLXArray, bits: Int, groupSize: Int = 32) -> PackedRows {
    let (words, scales, biases) = quantized(rows, groupSize: groupSize, bits: bits)
    return PackedRows(words: words, scales: scales, biases: biases ?? .mlxNone)
}

private func unpack(_ rows: PackedRows, bits: Int, groupSize: Int = 32) -> MLXArray {
    dequantized(
        rows.words, scales: rows.scales, biases: rows.biases, groupSize: groupSize, bits: bits)
}

/// The operations on packed rows and on the rows of a cache, against compositions of others.
@Suite struct OperationTests {
    private let queries = normal([2, 4, 3, 64], 1)
    private let keys = normal([2, 2, 40, 64], 2)
    private let values = normal([2, 2, 40, 32], 3)
    private let positions = MLXArray((0..<160).map { Int32($0 * 7 % 40) }, [2, 2, 40])

    @Test(arguments: [(8, 8), (4, 4), (8, 4)])
    func packedRowsAreAttendedAsTheyDequantise(bits: Int, valueBits: Int) throws {
        let (k, v) = (pack(keys, bits: bits), pack(values, bits: valueBits))
        let sinks = normal([4], 5)
        let (found, skipped) = try MLXFast.scaledDotProductAttentionQuantizedWithScoresAndLse(
            queries: queries, keys: k, values: v, scale: 0.125, bits: bits, groupSize: 32,
            valueBits: valueBits, mask: .causal, sinks: sinks)
        let expected = try MLXFast.scaledDotProductAttentionWithScoresAndLse(
            queries: queries, keys: unpack(k, bits: bits), values: unpack(v, bits: valueBits),
            scale: 0.125, mask: .causal, sinks: sinks)
        #expect(worst(found.output, expected.output) < 1e-4)
        #expect(worst(found.scores, expected.scores) < 1e-4)
        #expect(worst(found.lse, expected.lse) < 1e-4)
        #expect(skipped.shape == [2, 4, 3])
        #expect(skipped.asArray(Float.self).allSatisfy { $0 == 0 })
        let (output, scores) = try MLXFast.scaledDotProductAttentionQuantizedWithScores(
            queries: queries, keys: k, values: v, scale: 0.125, bits: bits, groupSize: 32,
            valueBits: valueBits, mask: .causal, sinks: sinks)
        #expect(worst(output, found.output) == 0)
        #expect(worst(scores, found.scores) == 0)
    }

    @Test func sparseValuesAreCounted() throws {
        let (k, v) = (pack(keys, bits: 8), pack(values, bits: 8))
        let (found, skipped) = try MLXFast.scaledDotProductAttentionQuantizedWithScoresAndLse(
            queries: queries, keys: k, values: v, scale: 0.5, groupSize: 32, mask: .causal,
            sparseVThreshold: 1e-3)
        let lse = found.lse.asArray(Float.self)
        var shares = [Float](repeating: 0, count: 24)
        for (index, score) in found.scores.asArray(Float.self).enumerated()
        where score > -.infinity && Foundation.exp(Double(score - lse[index / 40])) < 1e-3 {
            shares[index / 40] += 1.0 / 40
        }
        #expect(worst(skipped, MLXArray(shares, [2, 4, 3])) < 1e-6)
        #expect(shares.contains { $0 > 0.1 })
    }

    /// A row is folded into the one that is the same twice, and changes nothing there.
    @Test func duplicatesAreTheNearest() throws {
        let twice = MLXArray([Int32](0..<39) + [3]).asType(.uint32)
        let slots = broadcast(twice, to: [2, 2, 40])
        func doubled(_ rows: MLXArray) -> MLXArray {
            takeAlong(
                rows, broadcast(slots.expandedDimensions(axis: -1), to: rows.shape), axis: 2)
        }
        let ones = MLXArray.full([2, 2, 40], values: MLXArray(Float(1)), dtype: .float32)
        let (k, v) = (doubled(keys), doubled(values))
        let stay = MLXArray([Int32](0..<39)).asType(.uint32)
        let found = try fold(
            keys: k, values: v, bias: ones - ones, mass: ones, weights: ones,
            eligible: ones .> Float(0), kept: broadcast(stay, to: [2, 2, 39]))
        #expect(found.into.asArray(UInt32.self) == [3, 3, 3, 3])
        #expect(worst(found.keys, k[0..., 0..., 39...]) < 1e-6)
        #expect(worst(found.values, v[0..., 0..., 39...]) < 1e-6)
        #expect(found.bias.asArray(Float.self).allSatisfy { abs($0 - Foundation.log(2)) < 1e-6 })
        #expect(found.mass.asArray(Float.self).allSatisfy { $0 == 2 })
    }

    @Test(arguments: [H2OBackend.native, .composed])
    func attentionAndAverageInOne(backend: H2OBackend) throws {
        try withBackend(backend) {
            let importance = abs(normal([2, 2, 40], 7))
            let (_, scores) = try MLXFast.scaledDotProductAttentionWithScores(
                queries: queries, keys: keys, values: values, scale: 0.125, mask: .causal)
            let expected = try accumulateScores(importance, scores: scores, decay: 0.9)
            let found = try attentionAndAccumulate(
                queries: queries, keys: keys, values: values, importance: importance, scale: 0.125,
                decay: 0.9, mask: .causal)
            #expect(worst(found.importance, expected) < 1e-5)
        }
    }

    @Test(arguments: [H2OBackend.native, .composed])
    func chunksAreScoredWithoutTheirMatrix(backend: H2OBackend) throws {
        try withBackend(backend) {
            let (_, scores) = try MLXFast.scaledDotProductAttentionWithScores(
                queries: queries, keys: keys, values: values, scale: 0.125, mask: .causal)
            let unscored = MLXArray.full([2, 2, 40], values: MLXArray(Float.nan), dtype: .float32)
            let expected = try accumulateScores(
                unscored, scores: scores[0..., 0..., 1...], decay: 0.9)
            let found = try prefillScores(
                queries: queries, keys: keys, scale: 0.125, mask: .causal, decay: 0.9,
                countedQueries: 2)
            #expect(worst(found, expected) < 1e-5)
            let mass = try prefillScores(
                queries: queries, keys: keys, scale: 0.125, mask: .causal, kind: .mass)
            // Every weight once: 2 query heads times 3 queries per KV head.
            #expect(
                worst(mass.sum(axis: 2), MLXArray([Float](repeating: 6, count: 4), [2, 2])) < 1e-4)
        }
    }

    /// A batch does to each sequence what is done to it alone, with its own window.
    @Test(arguments: [H2OBackend.native, .composed]) func sequencesStandApart(backend: H2OBackend)
        throws
    {
        try withBackend(backend) {
            let importance = abs(normal([2, 2, 40], 7))
            let starts = [35, 11]
            let kept = try keepIndices(
                importance, positions: positions, keep: 30, sinkSize: 4,
                recentStart: MLXArray(starts))
            for b in 0..<2 {
                let alone = try keepIndices(
                    importance[b..<b + 1], positions: positions[b..<b + 1], keep: 30, sinkSize: 4,
                    recentStart: starts[b])
                #expect(
                    kept[b..<b + 1].asArray(UInt32.self) == alone.asArray(UInt32.self))
            }
            #expect(throws: H2OError.self) {
                try keepIndices(
                    importance, positions: positions, keep: 30, recentStart: MLXArray([1, 2, 3]))
            }
        }
    }

    @Test(arguments: [H2OBackend.native, .composed], [DType.float32, .bfloat16])
    func rowsAreQuantisedIntoTheirSlots(backend: H2OBackend, dtype: DType) throws {
        try withBackend(backend) {
            let (k, v) = (keys.asType(dtype), values.asType(dtype))
            let (newK, newV) = (normal([2, 2, 3, 64], 8, dtype), normal([2, 2, 3, 32], 9, dtype))
            let slots = MLXArray(
                [UInt32](repeating: 0, count: 4).flatMap { _ in [5, 0, 39] as [UInt32] }, [2, 2, 3])
            let found = try quantizeAppend(
                keys: pack(k, bits: 8), values: pack(v, bits: 4), newKeys: newK, newValues: newV,
                slots: slots, bits: 8, groupSize: 32, valueBits: 4)
            for (rows, new, stored, bits) in [
                (found.keys, newK, k, 8), (found.values, newV, v, 4),
            ] {
                let pairs = zip(
                    rows.parts, zip(pack(new, bits: bits).parts, pack(stored, bits: bits).parts))
                for (part, (fresh, before)) in pairs {
                    let at = broadcast(
                        slots.expandedDimensions(axis: -1), to: [2, 2, 3, part.dim(3)])
                    let expected = putAlong(before, at, values: fresh, axis: 2)
                    #expect(part.dtype == before.dtype)
                    #expect(worst(part, expected) == 0)
                }
            }
        }
    }

    @Test func keyDiversityIsTheCosineWithTheMean() throws {
        let found = try keyDiversity(keys)
        let directions = keys / sqrt(square(keys).sum(axis: -1, keepDims: true))
        let sum = directions.sum(axis: 2)
        let mean = (sum / sqrt(square(sum).sum(axis: -1, keepDims: true)))
            .expandedDimensions(axis: -1)
        #expect(worst(found, Float(0) - matmul(directions, mean).squeezed(axis: -1)) < 1e-5)
    }
}
