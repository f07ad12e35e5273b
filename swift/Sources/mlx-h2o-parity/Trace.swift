import Foundation
import MLX
import MLXH2O
import MLXH2OLM

/// A whole cache trace: chunks, then one token at a time; or rounds, some of whose tokens are taken
/// back. After each token or round, it records the kept positions of every head, ascending, C in
/// the same order, and the outputs.
func runTrace(_ parity: Case) throws -> [String: MLXArray] {
    let cache = try cache(of: parity)
    let tensors = try ["queries", "keys", "values"].map { try parity.tensor($0) }
    let (drafts, prefill) = (parity.fields.rounds, parity.fields.prefill ?? [])
    let lengths = prefill + Array(repeating: 1, count: parity.fields.steps ?? 0)
    var recorded = Recorded()
    var start = 0
    for (index, round) in (drafts ?? lengths.map { [$0, 0] }).enumerated() {
        guard round.count == 2 else { throw Case.Malformed(description: "a round is not a pair") }
        let part = tensors.map { $0[0..., 0..., start..<start + round[0]] }
        start += round[0]
        let step = index - prefill.count
        let output = try attended(parity, part, cache, step: step)
        if drafts != nil {
            guard cache.trim(round[1]) == round[1] else {
                throw Case.Malformed(description: "\(round[1]) tokens did not go back")
            }
            try cache.flush()
        }
        if step >= 0 { recorded.take(cache, output) }
    }
    if let file = parity.fields.save {
        try H2OKVCache.save([cache], to: URL(fileURLWithPath: file))
    }
    return recorded.results
}

private func cache(of parity: Case) throws -> H2OKVCache {
    guard let file = parity.fields.load else {
        return evictingCache(try configuration(of: parity), name: parity.name)
    }
    let (caches, _) = try H2OKVCache.load(from: URL(fileURLWithPath: file))
    guard let cache = caches.first as? H2OKVCache else {
        throw Case.Malformed(description: "\(file) holds no H2OKVCache")
    }
    return cache
}

/// Rows of a trace without a budget, at most; unused ones are padding.
private let unbounded = 512

/// The results after each step.
private struct Recorded {
    private var positions: [MLXArray] = []
    private var importance: [MLXArray] = []
    private var outputs: [MLXArray] = []

    mutating func take(_ cache: H2OKVCache, _ output: MLXArray) {
        guard let kept = cache.positions, let scores = cache.scores else { return }
        let order = argSort(kept, axis: -1)
        let budget = cache.configuration.budget
        let size = max(budget.maxKVSize ?? unbounded, budget.rowsAt?.map { $0[1] }.max() ?? 0)
        let found = [
            padded(takeAlong(kept, order, axis: -1), to: size, with: MLXArray(Int32(-1))),
            padded(takeAlong(scores, order, axis: -1), to: size, with: MLXArray(Float.nan)),
            output.asType(.float32),
        ]
        eval(found)
        positions.append(found[0])
        importance.append(found[1])
        outputs.append(found[2])
    }

    /// For each step; outputs for each query, [queries, B, H, D].
    var results: [String: MLXArray] {
        [
            "positions": stacked(positions), "scores": stacked(importance),
            "out": concatenated(outputs, axis: 2).transposed(2, 0, 1, 3),
        ]
    }
}

/// One update and its attention, through routing as in a model; or attention followed by its
/// scores, or by the recorded scores of the case.
private func attended(
    _ parity: Case, _ part: [MLXArray], _ cache: H2OKVCache, step: Int
) throws -> MLXArray {
    let scale = try parity.field(\.scale, "scale")
    let mask: MLXFast.ScaledDotProductAttentionMaskMode = part[0].dim(2) > 1 ? .causal : .none
    if parity.fields.routed == true {
        return try withError {
            MLXH2OLM.attentionWithCacheUpdate(
                queries: part[0], keys: part[1], values: part[2], cache: cache, scale: scale,
                mask: mask)
        }
    }
    let (output, computed) = try attended(part, cache, scale: scale, mask: mask)
    guard step >= 0, parity.fields.replay == true, let kept = cache.positions else {
        try cache.accumulate(computed)
        return output
    }
    try cache.accumulate(scores(of: parity.tensor("recorded"), step: step, at: kept))
    return output
}

/// Appends and attends: for few queries over the packed rows of a quantised cache.
private func attended(
    _ part: [MLXArray], _ cache: H2OKVCache, scale: Float,
    mask: MLXFast.ScaledDotProductAttentionMaskMode
) throws -> (MLXArray, MLXArray) {
    let (keys, values) = try cache.append(keys: part[1], values: part[2])
    if let cache = cache as? QuantizedH2OKVCache, part[0].dim(2) <= 8,
        let keys = cache.packedKeys, let values = cache.packedValues
    {
        return try MLXFast.scaledDotProductAttentionQuantizedWithScores(
            queries: part[0], keys: keys, values: values, scale: scale, bits: cache.bits,
            groupSize: cache.groupSize, valueBits: cache.configuration.format.valueBits, mask: mask)
    }
    return try MLXFast.scaledDotProductAttentionWithScores(
        queries: part[0], keys: keys, values: values, scale: scale, mask: mask)
}

func configuration(of parity: Case) throws -> H2OConfiguration {
    try H2OConfiguration(
        .init(
            parity.fields.maxKvSize, sinkSize: try parity.field(\.sinkSize, "sink_size"),
            heavySize: parity.fields.heavySize, recentSize: parity.fields.recentSize,
            evictEvery: parity.fields.evictEvery ?? 1, speculative: parity.fields.speculative ?? 0,
            contextSize: parity.fields.contextSize, rowsAt: parity.fields.rowsAt),
        .named(
            kvBits: parity.fields.kvBits, valueBits: parity.fields.vBits,
            denseSize: parity.fields.denseSize ?? 0, isFramed: parity.fields.kvFrame ?? false,
            groupSize: parity.fields.kvGroupSize ?? 64, kvFormat: parity.fields.kvFormat),
        policy: .init(
            PolicyName(named: parity.field(\.policy, "policy")),
            decay: parity.field(\.decay, "decay"), folds: parity.fields.fold ?? true))
}

/// Recorded scores [steps, B, Hq, T] of one step, in the order of the slots: [B, Hq, 1, N].
private func scores(of recorded: MLXArray, step: Int, at positions: MLXArray) -> MLXArray {
    let ofStep = recorded[step..<step + 1].squeezed(axis: 0)
    let shape = positions.shape
    let group = ofStep.dim(1) / shape[1]
    let slots = broadcast(
        positions.expandedDimensions(axis: 2), to: [shape[0], shape[1], group, shape[2]])
    let perQueryHead = slots.reshaped([shape[0], shape[1] * group, shape[2]])
    return takeAlong(ofStep, perQueryHead, axis: -1).expandedDimensions(axis: 2)
}

private func padded(_ rows: MLXArray, to size: Int, with value: MLXArray) -> MLXArray {
    let missing = Array(rows.shape.dropLast()) + [max(0, size - rows.dim(-1))]
    return concatenated([rows, MLXArray.full(missing, values: value, dtype: rows.dtype)], axis: -1)
}
