import MLX
import MLXH2O

// A decode step by the operations themselves, over dense or packed rows.

/// out and importance.
func runAttend(_ parity: Case) throws -> [String: MLXArray] {
    guard parity.fields.bits != nil else {
        return try attend(parity, parity.rows("keys"), parity.rows("values"), (8, 8, 64))
    }
    return try attend(
        parity, parity.packedRows("keys"), parity.packedRows("values"), parity.packing())
}

private typealias Packing = (bits: Int, valueBits: Int, groupSize: Int)

private func attend<Rows: CacheRows>(
    _ parity: Case, _ keys: Rows, _ values: Rows, _ packing: Packing
) throws -> [String: MLXArray] {
    let found = try attentionAndAccumulate(
        queries: parity.tensor("queries"), keys: keys, values: values,
        importance: parity.tensor("importance"), scale: parity.field(\.scale, "scale"),
        kind: parity.fields.kind.flatMap { ChunkScores(rawValue: $0) } ?? .ema,
        decay: parity.field(\.decay, "decay"), mask: parity.mask(),
        sinks: parity.optionalTensor("sinks"), rowBias: parity.optionalTensor("row_bias"),
        bits: packing.bits, groupSize: packing.groupSize, valueBits: packing.valueBits,
        sparseVThreshold: parity.fields.sparseVThreshold ?? 0)
    return ["out": found.output.asType(.float32), "importance": found.importance]
}

/// Everything that the replacement returns, packed rows part by part.
func runReplacement(_ parity: Case) throws -> [String: MLXArray] {
    guard parity.fields.bits != nil else {
        return try replacement(parity, parity.rows("keys"), parity.rows("values"), (8, 8, 64))
    }
    return try replacement(
        parity, parity.packedRows("keys"), parity.packedRows("values"), parity.packing())
}

private func replacement<Rows: CacheRows>(
    _ parity: Case, _ keys: Rows, _ values: Rows, _ packing: Packing
) throws -> [String: MLXArray] {
    let found = try replaceWorst(
        keys: keys, values: values, importance: parity.tensor("importance"),
        positions: parity.tensor("positions"), newKeys: parity.tensor("new_keys"),
        newValues: parity.tensor("new_values"), position: parity.position(),
        sinkSize: parity.fields.sinkSize ?? 0, recentStart: parity.recentStart(),
        bits: packing.bits, groupSize: packing.groupSize, valueBits: packing.valueBits)
    let rows = [("keys", found.keys.parts), ("values", found.values.parts)]
    return rows.reduce(
        into: ["importance": found.importance, "positions": found.positions]
    ) { results, side in
        results.merge(StoredRows(parts: side.1).named(side.0)) { first, _ in first }
    }
}

/// Many steps: out, positions after each, and importance.
func runSteps(_ parity: Case) throws -> [String: MLXArray] {
    let count = try parity.tensor("positions").dim(2)
    let (keys, values) = (
        try parity.tensor("keys")[0..., 0..., ..<count],
        try parity.tensor("values")[0..., 0..., ..<count]
    )
    guard parity.fields.bits != nil else {
        return try steps(parity, keys, values, (8, 8, 64))
    }
    let packing = try parity.packing()
    return try steps(
        parity, pack(keys, packing.bits, packing.groupSize),
        pack(values, packing.valueBits, packing.groupSize), packing)
}

private func pack(_ rows: MLXArray, _ bits: Int, _ groupSize: Int) -> PackedRows {
    let (words, scales, biases) = quantized(rows, groupSize: groupSize, bits: bits)
    return PackedRows(words: words, scales: scales, biases: biases ?? .mlxNone)
}

private func steps<Rows: CacheRows>(
    _ parity: Case, _ keys: Rows, _ values: Rows, _ packing: Packing
) throws -> [String: MLXArray] {
    let queries = try parity.tensor("queries")
    let (allKeys, allValues) = (try parity.tensor("keys"), try parity.tensor("values"))
    let sinkSize = try parity.field(\.sinkSize, "sink_size")
    let recentSize = try parity.field(\.recentSize, "recent_size")
    var (keys, values) = (keys, values)
    var importance = try parity.tensor("importance")
    var positions = try parity.tensor("positions")
    let first = positions.dim(2)
    var outputs: [MLXArray] = []
    var places: [MLXArray] = []
    for step in 0..<queries.dim(2) {
        let position = first + step
        let replaced = try replaceWorst(
            keys: keys, values: values, importance: importance, positions: positions,
            newKeys: allKeys[0..., 0..., position..<position + 1],
            newValues: allValues[0..., 0..., position..<position + 1], position: position,
            sinkSize: sinkSize, recentStart: position + 1 - recentSize, bits: packing.bits,
            groupSize: packing.groupSize, valueBits: packing.valueBits)
        (keys, values, positions) = (replaced.keys, replaced.values, replaced.positions)
        let attended = try attentionAndAccumulate(
            queries: queries[0..., 0..., step..<step + 1], keys: keys, values: values,
            importance: replaced.importance, scale: parity.field(\.scale, "scale"),
            decay: parity.field(\.decay, "decay"), bits: packing.bits,
            groupSize: packing.groupSize, valueBits: packing.valueBits)
        importance = attended.importance
        outputs.append(attended.output)
        places.append(positions)
    }
    return [
        "out": concatenated(outputs, axis: 2).asType(.float32),
        "positions": stacked(places).asType(.float32), "importance": importance,
    ]
}
