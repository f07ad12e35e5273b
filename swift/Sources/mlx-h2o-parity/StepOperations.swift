import MLX
import MLXH2O

// Attention whose scores go into the average, over dense or packed rows.

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
