import MLX
import MLXH2O

/// out, scores, lse and skipped of packed rows.
func runQuantized(_ parity: Case) throws -> [String: MLXArray] {
    let (bits, valueBits, groupSize) = try parity.packing()
    let (result, skipped) = try MLXFast.scaledDotProductAttentionQuantizedWithScoresAndLse(
        queries: parity.tensor("queries"), keys: parity.packedRows("keys"),
        values: parity.packedRows("values"), scale: parity.field(\.scale, "scale"), bits: bits,
        groupSize: groupSize, valueBits: valueBits, mask: parity.mask(),
        sinks: parity.optionalTensor("sinks"), rowBias: parity.optionalTensor("row_bias"),
        sparseVThreshold: parity.fields.sparseVThreshold ?? 0)
    return [
        "out": result.output.asType(.float32), "scores": result.scores, "lse": result.lse,
        "skipped": skipped,
    ]
}

/// out, scores, lse and probe_scores of dense or packed rows.
func runProbes(_ parity: Case) throws -> [String: MLXArray] {
    guard parity.fields.bits != nil else {
        return try probes(parity, parity.rows("keys"), parity.rows("values"), (8, 8, 64))
    }
    return try probes(
        parity, parity.packedRows("keys"), parity.packedRows("values"), parity.packing())
}

private func probes<Rows: CacheRows>(
    _ parity: Case, _ keys: Rows, _ values: Rows,
    _ packing: (bits: Int, valueBits: Int, groupSize: Int)
) throws -> [String: MLXArray] {
    let (result, probeScores) = try MLXFast.scaledDotProductAttentionWithProbes(
        queries: parity.tensor("queries"), keys: keys, values: values,
        probes: parity.tensor("probes"), scale: parity.field(\.scale, "scale"), bits: packing.bits,
        groupSize: packing.groupSize, valueBits: packing.valueBits, mask: parity.mask(),
        sinks: parity.optionalTensor("sinks"))
    return [
        "out": result.output.asType(.float32), "scores": result.scores, "lse": result.lse,
        "probe_scores": probeScores,
    ]
}

func runAccumulate(_ parity: Case) throws -> [String: MLXArray] {
    [
        "importance": try accumulateScores(
            parity.tensor("importance"), scores: parity.tensor("scores"),
            decay: parity.field(\.decay, "decay"))
    ]
}

/// Keys, values, importance and positions with a new row in place of the worst.
func runReplace(_ parity: Case) throws -> [String: MLXArray] {
    let ranks: RowRanks =
        switch parity.fields.ranks {
        case "array": .array(try parity.tensor("ranks"))
        case "age": .age
        case "key_diversity": .keyDiversity
        default: .importance
        }
    let found = try replaceWorst(
        keys: parity.tensor("keys"), values: parity.tensor("values"),
        importance: parity.tensor("importance"), positions: parity.tensor("positions"),
        newKeys: parity.tensor("new_keys"), newValues: parity.tensor("new_values"),
        position: parity.position(), sinkSize: parity.fields.sinkSize ?? 0,
        recentStart: parity.recentStart(), ranks: ranks)
    return [
        "keys": found.keys.asType(.float32), "values": found.values.asType(.float32),
        "importance": found.importance, "positions": found.positions,
    ]
}

/// The packed keys and values, part by part.
func runAppend(_ parity: Case) throws -> [String: MLXArray] {
    let (bits, valueBits, groupSize) = try parity.packing()
    let found = try quantizeAppend(
        keys: parity.packedRows("keys"), values: parity.packedRows("values"),
        newKeys: parity.tensor("new_keys"), newValues: parity.tensor("new_values"),
        slots: parity.tensor("slots"), bits: bits, groupSize: groupSize, valueBits: valueBits)
    var results: [String: MLXArray] = [:]
    for (side, rows) in [("keys", found.keys), ("values", found.values)] {
        results["\(side)_words"] = rows.words
        results["\(side)_scales"] = rows.scales.asType(.float32)
        results["\(side)_biases"] = rows.biases.asType(.float32)
    }
    return results
}

func runPrefill(_ parity: Case) throws -> [String: MLXArray] {
    guard let kind = parity.fields.kind.flatMap({ ChunkScores(rawValue: $0) }) else {
        throw Case.Malformed(description: "kind is missing or another one")
    }
    return [
        "importance": try prefillScores(
            queries: parity.tensor("queries"), keys: parity.tensor("keys"),
            scale: parity.field(\.scale, "scale"), mask: parity.mask(),
            sinks: parity.optionalTensor("sinks"), kind: kind,
            importance: parity.optionalTensor("importance"),
            decay: parity.field(\.decay, "decay"),
            countedQueries: parity.field(\.queries, "queries"))
    ]
}

/// The slots that stay, those of the rows that change, and these rows.
func runMerge(_ parity: Case) throws -> [String: MLXArray] {
    let found = try mergers(
        keys: parity.tensor("keys"), values: parity.tensor("values"), bias: parity.tensor("bias"),
        positions: parity.tensor("positions"), keep: parity.field(\.keep, "keep"),
        sinkSize: parity.fields.sinkSize ?? 0, recentStart: parity.recentStart(),
        sharedHeads: parity.field(\.shared, "shared"))
    return [
        "kept": found.kept, "into": found.into, "keys": found.keys.asType(.float32),
        "values": found.values.asType(.float32), "bias": found.bias,
        "positions": found.positions,
    ]
}
