import MLX
import MLXH2O

/// out, scores, lse and skipped of packed rows or of codes.
func runQuantized(_ parity: Case) throws -> [String: MLXArray] {
    let (bits, valueBits, groupSize) = try parity.packing()
    let (result, skipped) = try MLXFast.scaledDotProductAttentionQuantizedWithScoresAndLse(
        queries: parity.tensor("queries"), keys: parity.storedRows("keys"),
        values: parity.storedRows("values"), scale: parity.field(\.scale, "scale"), bits: bits,
        groupSize: groupSize, valueBits: valueBits, mask: parity.mask(),
        sinks: parity.optionalTensor("sinks"), rowBias: parity.optionalTensor("row_bias"),
        sparseVThreshold: parity.fields.sparseVThreshold ?? 0)
    return [
        "out": result.output.asType(.float32), "scores": result.scores, "lse": result.lse,
        "skipped": skipped,
    ]
}

func runAccumulate(_ parity: Case) throws -> [String: MLXArray] {
    [
        "importance": try accumulateScores(
            parity.tensor("importance"), scores: parity.tensor("scores"),
            decay: parity.field(\.decay, "decay"))
    ]
}

/// The stored keys and values, part by part.
func runAppend(_ parity: Case) throws -> [String: MLXArray] {
    let (bits, valueBits, groupSize) = try parity.packing()
    let found = try quantizeAppend(
        keys: parity.storedRows("keys"), values: parity.storedRows("values"),
        newKeys: parity.tensor("new_keys"), newValues: parity.tensor("new_values"),
        slots: parity.tensor("slots"), bits: bits, groupSize: groupSize, valueBits: valueBits)
    return found.keys.named("keys").merging(found.values.named("values")) { first, _ in first }
}

/// The rows that codes stand for.
func runCodes(_ parity: Case) throws -> [String: MLXArray] {
    let (bits, _, _) = try parity.packing()
    let ofValues = parity.fields.kind == "values"
    let codes = try encodeRows(parity.tensor("rows"), bits: bits, ofValues: ofValues)
    return ["rows": try decodeRows(codes, bits: bits, ofValues: ofValues)]
}

func runPrefill(_ parity: Case) throws -> [String: MLXArray] {
    guard let kind = parity.fields.kind.flatMap({ ChunkScores(rawValue: $0) }) else {
        throw Case.Malformed(description: "kind is missing or another one")
    }
    return [
        "importance": try prefillScores(
            queries: parity.tensor("queries"), keys: parity.tensor("keys"),
            scale: parity.field(\.scale, "scale"), mask: parity.mask(),
            sinks: parity.optionalTensor("sinks"), rowBias: parity.optionalTensor("row_bias"),
            kind: kind,
            importance: parity.optionalTensor("importance"),
            decay: parity.field(\.decay, "decay"),
            countedQueries: parity.field(\.queries, "queries"))
    ]
}

/// The slots of the changed rows, and these rows.
func runFold(_ parity: Case) throws -> [String: MLXArray] {
    let found = try fold(
        keys: parity.tensor("keys"), values: parity.tensor("values"), bias: parity.tensor("bias"),
        mass: parity.tensor("mass"), weights: parity.tensor("weights"),
        eligible: parity.tensor("eligible"), kept: parity.tensor("kept"),
        share: parity.field(\.share, "share"))
    return [
        "into": found.into, "keys": found.keys.asType(.float32),
        "values": found.values.asType(.float32), "bias": found.bias, "mass": found.mass,
    ]
}
