import MLX
import MLXH2O
import Testing

private func pack(_ shape: [Int], bits: Int = 8) -> PackedRows {
    let (words, scales, biases) = quantized(zeros(shape), groupSize: 64, bits: bits)
    return PackedRows(words: words, scales: scales, biases: biases ?? .mlxNone)
}

private func attend(
    queries: [Int] = [1, 4, 1, 64], keys: PackedRows? = nil, values: PackedRows? = nil,
    bits: Int = 8, groupSize: Int = 64, valueBits: Int? = nil, threshold: Float = 0,
    scale: Float = 1
) throws {
    _ = try MLXFast.scaledDotProductAttentionQuantizedWithScores(
        queries: zeros(queries), keys: keys ?? pack([1, 2, 5, 64]),
        values: values ?? pack([1, 2, 5, 64]), scale: scale, bits: bits, groupSize: groupSize,
        valueBits: valueBits, sparseVThreshold: threshold)
}

private func append(
    slots: MLXArray? = nil, bits: Int = 8, rows: [Int] = [1, 2, 3, 64]
) throws {
    _ = try quantizeAppend(
        keys: pack([1, 2, 5, 64]), values: pack([1, 2, 5, 64]), newKeys: zeros(rows),
        newValues: zeros(rows), slots: slots ?? zeros([1, 2, 3], .uint32), bits: bits)
}

private func folded(
    values: MLXArray? = nil, bias: DType = .float32, kept: MLXArray? = nil
) throws {
    let ones = zeros([1, 2, 5])
    _ = try fold(
        keys: zeros([1, 2, 5, 64]), values: values ?? zeros([1, 2, 5, 32]),
        bias: zeros([1, 2, 5], bias), mass: ones, weights: ones,
        eligible: zeros([1, 2, 5], .bool), kept: kept ?? zeros([1, 2, 4], .uint32))
}

private func prefill(
    kind: ChunkScores = .ema, importance: [Int]? = nil, decay: Double = 0.9, counted: Int = 128
) throws {
    _ = try prefillScores(
        queries: zeros([1, 4, 2, 64]), keys: zeros([1, 2, 5, 64]), scale: 1, kind: kind,
        importance: importance.map { zeros($0) }, decay: decay, countedQueries: counted)
}

/// Nothing traps: wrong arguments throw, in the words of the Python package.
@Suite struct OperationErrorTests {
    private static var empty: PackedRows {
        PackedRows(words: .mlxNone, scales: .mlxNone, biases: .mlxNone)
    }

    private static let calls: [(String, Call)] = [
        (
            "queries are float32 (4, 1, 64), expected float32, float16 or bfloat16 [B, Hq, Lq, D]",
            { try attend(queries: [4, 1, 64]) }
        ),
        ("kept is uint32 (1, 2, 5), expected", { try folded(kept: zeros([1, 2, 5], .uint32)) }),
        ("kept is int32 (1, 2, 4), expected", { try folded(kept: zeros([1, 2, 4], .int32)) }),
        (
            "bias is float16 (1, 2, 5), expected float32 [B, H, N] = (1, 2, 5).",
            { try folded(bias: .float16) }
        ),
        (
            "values are float32 (1, 2, 6, 32), expected float32 [B, H, N, Dv] = (1, 2, 5, Dv)",
            { try folded(values: zeros([1, 2, 6, 32])) }
        ),
        ("values are an empty handle, expected an array", { try folded(values: .mlxNone) }),
        ("bits is 7, expected one of (2, 3, 4, 5, 6, 8).", { try attend(bits: 7) }),
        ("v_bits is 1, expected one of (2, 3, 4, 5, 6, 8).", { try attend(valueBits: 1) }),
        ("group_size is 48, expected one of (32, 64, 128).", { try attend(groupSize: 48) }),
        ("bits is 2147483647, expected one of", { try attend(bits: .max) }),
        (
            "sparse_v_threshold is 1.0, expected at least 0 and below 1.",
            { try attend(threshold: 1) }
        ),
        ("sparse_v_threshold is nan, expected a finite number.", { try attend(threshold: .nan) }),
        ("scale is inf, expected a finite number.", { try attend(scale: .infinity) }),
        ("keys are an empty handle, expected an array", { try attend(keys: empty) }),
        (
            "value words are uint32 (1, 2, 6, 16), expected uint32 [B, Hkv, N, Dv * v_bits / 32]",
            { try attend(values: pack([1, 2, 6, 64])) }
        ),
        (
            "key words are uint32 (1, 2, 5, 16), expected uint32 [B, Hkv, N, D * bits / 32]",
            { try attend(queries: [1, 3, 1, 64]) }
        ),
        (
            "slots are int32 (1, 2, 3), expected uint32 [B, H, L] = (1, 2, 3).",
            { try append(slots: zeros([1, 2, 3], .int32)) }
        ),
        ("bits is 0, expected one of", { try append(bits: 0) }),
        ("new keys are float32 (1, 2, 0, 64), expected", { try append(rows: [1, 2, 0, 64]) }),
        ("decay is 1.0, expected at least 0 and below 1.", { try prefill(decay: 1) }),
        ("decay is nan, expected a finite number.", { try prefill(decay: .nan) }),
        ("queries is 0, expected at least 1.", { try prefill(counted: 0) }),
        (
            "importance is float32 (1, 2, 6), expected float32 [B, Hkv, N] = (1, 2, 5).",
            { try prefill(importance: [1, 2, 6]) }
        ),
        (
            "importance is given with kind 'mass', expected it with 'ema'.",
            { try prefill(kind: .mass, importance: [1, 2, 5]) }
        ),
        (
            "scores are float32 (2, 5), expected float32 [B, Hq, Lq, N]",
            { _ = try accumulateScores(zeros([1, 2, 5]), scores: zeros([2, 5]), decay: 0.5) }
        ),
        (
            "keys are int32 (1, 2, 5, 64), expected float32",
            { _ = try keyDiversity(zeros([1, 2, 5, 64], .int32)) }
        ),
        ("keys are an empty handle, expected an array", { _ = try keyDiversity(.mlxNone) }),
    ]

    @Test(arguments: calls.indices) func wrongArgumentsThrow(index: Int) throws {
        let (text, call) = Self.calls[index]
        let error = #expect(throws: H2OError.self) { try call() }
        let description = try #require(error).description
        #expect(description.hasPrefix("["))
        #expect(description.contains("] " + text), "\(description)")
    }
}
