import MLX
import MLXH2O
import Testing

private func attend(
    queries: [Int] = [1, 4, 1, 32], keys: [Int] = [1, 2, 8, 32], values: [Int] = [1, 2, 8, 16],
    dtypes: [DType] = [.float32, .float32, .float32], scale: Float = 1,
    mask: (shape: [Int], dtype: DType)? = nil, sinks: (shape: [Int], dtype: DType)? = nil,
    rowBias: (shape: [Int], dtype: DType)? = nil
) throws {
    _ = try MLXFast.scaledDotProductAttentionWithScores(
        queries: zeros(queries, dtypes[0]), keys: zeros(keys, dtypes[1]),
        values: zeros(values, dtypes[2]), scale: scale,
        mask: mask.map { .array(zeros($0.shape, $0.dtype)) } ?? .none,
        sinks: sinks.map { zeros($0.shape, $0.dtype) },
        rowBias: rowBias.map { zeros($0.shape, $0.dtype) })
}

private func keep(
    scores: [Int] = [1, 2, 8], positions: [Int] = [1, 2, 8],
    dtypes: [DType] = [.float32, .int32], keep: Int = 4, sinkSize: Int = 0
) throws {
    _ = try keepIndices(
        zeros(scores, dtypes[0]), positions: zeros(positions, dtypes[1]), keep: keep,
        sinkSize: sinkSize)
}

@Suite struct ErrorTests {
    private static let attention: [(String, Call)] = [
        (
            "queries are float32 (1, 4, 32), expected float32, float16 or bfloat16 [B, Hq, Lq, D]",
            { try attend(queries: [1, 4, 32]) }
        ),
        (
            "values are float32 (1, 1, 2, 8, 16), expected float32 [B, Hkv, N, Dv]",
            { try attend(values: [1, 1, 2, 8, 16]) }
        ),
        (
            "keys are float32 (1, 2, 8, 32), expected float32 [B, Hkv, N, D] = (1, Hkv, N, 32)",
            { try attend(queries: [1, 3, 1, 32]) }
        ),
        (
            "keys are float32 (1, 2, 8, 64), expected float32 [B, Hkv, N, D] = (1, Hkv, N, 32)",
            { try attend(keys: [1, 2, 8, 64]) }
        ),
        (
            "values are float32 (1, 2, 9, 16), expected float32 [B, Hkv, N, Dv] = (1, 2, 8, Dv)",
            { try attend(values: [1, 2, 9, 16]) }
        ),
        (
            "keys are float32 (1, 2, 0, 32), expected",
            { try attend(keys: [1, 2, 0, 32], values: [1, 2, 0, 16]) }
        ),
        ("queries are float32 (1, 4, 0, 32), expected", { try attend(queries: [1, 4, 0, 32]) }),
        (
            "queries are int32 (1, 4, 1, 32), expected float32, float16 or bfloat16",
            { try attend(dtypes: [.int32, .float32, .float32]) }
        ),
        (
            "keys are float32 (1, 2, 8, 32), expected float16",
            { try attend(dtypes: [.float16, .float32, .float32]) }
        ),
        ("scale is nan, expected a finite number.", { try attend(scale: .nan) }),
        ("mask is bool (1, 4, 1, 7), expected", { try attend(mask: ([1, 4, 1, 7], .bool)) }),
        ("mask is int32", { try attend(mask: ([1, 4, 1, 8], .int32)) }),
        ("sinks are float32 (2,), expected", { try attend(sinks: ([2], .float32)) }),
        ("sinks are int32", { try attend(sinks: ([4], .int32)) }),
        (
            "row_bias is float32 (1, 4, 8), expected float32 [B, Hkv, N] = (1, 2, 8).",
            { try attend(rowBias: ([1, 4, 8], .float32)) }
        ),
        ("row_bias is float16 (1, 2, 8)", { try attend(rowBias: ([1, 2, 8], .float16)) }),
    ]

    @Test(arguments: attention.indices)
    func attentionRefuses(index: Int) {
        let (message, call) = Self.attention[index]
        let error = #expect(throws: H2OError.self) { try call() }
        let expected = "[scaled_dot_product_attention_with_scores] \(message)"
        #expect(error?.description.hasPrefix(expected) == true, "\(error?.description ?? "")")
    }

    private static let selection: [(String, Call)] = [
        ("scores are float32 (2, 8), expected float32 [B, H, N]", { try keep(scores: [2, 8]) }),
        (
            "positions are int32 (1, 2, 7), expected int32 [B, H, N] = (1, 2, 8).",
            { try keep(positions: [1, 2, 7]) }
        ),
        (
            "scores are float32 (1, 2, 0), expected",
            { try keep(scores: [1, 2, 0], positions: [1, 2, 0]) }
        ),
        (
            "scores are float16 (1, 2, 8), expected float32",
            { try keep(dtypes: [.float16, .int32]) }
        ),
        (
            "positions are uint32 (1, 2, 8), expected int32",
            { try keep(dtypes: [.float32, .uint32]) }
        ),
        ("keep is 0, expected at least 1 and at most N = 8.", { try keep(keep: 0) }),
        ("keep is 9, expected at least 1 and at most N = 8.", { try keep(keep: 9) }),
        ("sink_size is -1, expected at least 0.", { try keep(sinkSize: -1) }),
    ]

    @Test(arguments: selection.indices)
    func keepIndicesRefuses(index: Int) {
        let (message, call) = Self.selection[index]
        let error = #expect(throws: H2OError.self) { try call() }
        #expect(
            error?.description.hasPrefix("[keep_indices] \(message)") == true,
            "\(error?.description ?? "")")
    }

    /// Numbers that C's int does not hold must not wrap around into valid ones.
    @Test func hugeNumbersAreNotTruncated() throws {
        #expect(throws: H2OError.self) { try keep(keep: 1 << 32 + 4) }
        let scores = MLXArray([3, 1, 2] as [Float], [1, 1, 3])
        let positions = MLXArray([0, 1, 2] as [Int32], [1, 1, 3])
        let kept = try keepIndices(scores, positions: positions, keep: 2, recentStart: 1 << 40)
        #expect(kept.asArray(UInt32.self) == [0, 2])
    }

    @Test func nothingIsWrongAfterAnError() throws {
        #expect(throws: H2OError.self) { try attend(scale: .infinity) }
        try attend()
    }
}

@Suite struct BackendTests {
    @Test(arguments: [H2OBackend.native, .composed]) func cpuBackEndsAreAvailable(
        backend: H2OBackend
    ) {
        #expect(backend.status.isAvailable)
        #expect(backend.status.reason == "")
    }

    #if os(Linux)
    @Test(arguments: [H2OBackend.metal, .cuda]) func gpuBackEndsSayWhyNot(backend: H2OBackend) {
        let status = backend.status
        #expect(!status.isAvailable)
        #expect(!status.reason.isEmpty)
        let error = #expect(throws: H2OError.self) { try withBackend(backend) { try attend() } }
        #expect(
            error?.description
                == "[withBackend] back end '\(backend.rawValue)' is not available: \(status.reason)"
        )
    }
    #endif

    /// Named back ends differ in rounding: the choice is seen, and ends with the block.
    @Test func theChoiceIsScoped() throws {
        let key = MLXRandom.key(3)
        let queries = MLXRandom.normal([1, 4, 1, 100], dtype: .float32, key: key)
        let keys = MLXRandom.normal([1, 1, 1000, 100], dtype: .float32, key: key)
        func scores(_ backend: H2OBackend?) throws -> [Float] {
            try withBackend(backend) {
                try MLXFast.scaledDotProductAttentionWithScores(
                    queries: queries, keys: keys, values: keys, scale: 1
                ).1.asArray(Float.self)
            }
        }
        let (native, composed) = (try scores(.native), try scores(.composed))
        #expect(native != composed)
        #expect(try scores(nil) == native)
        #expect(try withBackend(.composed) { try scores(.native) } == native)
    }
}
