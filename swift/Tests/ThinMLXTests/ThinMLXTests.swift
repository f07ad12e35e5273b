import Foundation
import MLX
import MLXLMCommon
import Testing

/// The part of mlx-swift's API that the Linux build brings, against mlx-swift's documentation.
@Suite struct ThinMLXTests {
    private let matrix = MLXArray(Int32(0)..<12, [3, 4])

    @Test func describesItself() {
        #expect(matrix.shape == [3, 4])
        #expect(matrix.dim(-1) == 4)
        #expect(matrix.ndim == 2)
        #expect(matrix.size == 12)
        #expect(matrix.nbytes == 48)
        #expect(matrix.dtype == .int32)
        #expect(MLXArray(Float(2)).shape == [])
        #expect(MLXArray(Float(2)).item(Float.self) == 2)
    }

    @Test func readsParts() {
        #expect(matrix[1..<2].asArray(Int32.self) == [4, 5, 6, 7])
        #expect(matrix[0..., 3...].asArray(Int32.self) == [3, 7, 11])
        #expect(matrix[.ellipsis, ..<1].asArray(Int32.self) == [0, 4, 8])
        #expect(matrix[1..., .ellipsis, ..<1].asArray(Int32.self) == [4, 8])
        #expect(matrix[(-1)..., (-2)...].asArray(Int32.self) == [10, 11])
        #expect(matrix[2..<9].shape == [1, 4])
        #expect(matrix[.newAxis, 0..., .newAxis].shape == [1, 3, 1, 4])
        #expect(matrix[.ellipsis, .newAxis].shape == [3, 4, 1])
    }

    @Test func writesParts() {
        let copy = matrix[.ellipsis]
        copy[1..<3, ..<2] = MLXArray([90, 91, 92, 93] as [Int32], [2, 2])
        #expect(copy.asArray(Int32.self) == [0, 1, 2, 3, 90, 91, 6, 7, 92, 93, 10, 11])
        #expect(matrix.asArray(Int32.self) == Array(0..<12))
    }

    @Test func scalarsTakeTheTypeOfTheArray() {
        let halves = matrix.asType(.float16)
        #expect((halves * 2).dtype == .float16)
        #expect((halves + Float(0.5)).dtype == .float16)
        #expect((matrix * 2).dtype == .int32)
        #expect((matrix * Float(0.5)).dtype == .float32)
        #expect(maximum(matrix, 3).dtype == .int32)
    }

    @Test(arguments: [DType.float16, .bfloat16]) func halvesAreReadAsFloats(dtype: DType) {
        let values: [Float] = [0, -1.5, 256, .infinity]
        #expect(MLXArray(values).asType(dtype).asArray(Float.self) == values)
    }

    @Test func strideDoesNotShow() {
        #expect(matrix.swappedAxes(0, 1)[1..<2].asArray(Int32.self) == [1, 5, 9])
    }

    @Test func errorsAreThrownByTheirOwnBlock() throws {
        let bad = { matmul(MLXArray.zeros([1, 2], dtype: .float32), self.matrix) }
        try withError {
            _ = #expect(throws: MLXError.self) { try withError { bad() } }
        }
        #expect(throws: MLXError.self) {
            try withError { box in
                _ = bad()
                try box.check()
                Issue.record("check() did not throw")
            }
        }
    }

    @Test func whatFailedStaysAnError() {
        #expect(throws: MLXError.self) {
            try withError { (matmul(self.matrix, self.matrix) + 1).shape }
        }
    }

    @Test func dependsEvaluatesWhatItNames() {
        let side = matrix + 1
        let main = depends(input: matrix * 2, dependencies: [side])
        #expect(main.asArray(Int32.self) == Array(stride(from: 0, to: 24, by: 2)))
    }

    @Test func filesKeepArraysAndMetadata() throws {
        let url = FileManager.default.temporaryDirectory
            .appending(path: "mlx-h2o-\(UUID().uuidString).safetensors")
        defer { try? FileManager.default.removeItem(at: url) }
        let half = MLXArray([1, 2] as [Float]).asType(.bfloat16)
        try save(arrays: ["a": matrix, "b": half], metadata: ["name": "value"], url: url)
        let (arrays, metadata) = try loadArraysAndMetadata(url: url)
        #expect(arrays.count == 2)
        #expect(arrays["a"]?.asArray(Int32.self) == Array(0..<12))
        #expect(arrays["b"]?.dtype == .bfloat16)
        #expect(metadata["name"] == "value")
        #expect(throws: (any Error).self) {
            try loadArrays(url: url.deletingPathExtension())
        }
        #expect(throws: (any Error).self) {
            try loadArrays(url: url.appendingPathExtension("missing.safetensors"))
        }
    }

    @Test func theSimpleCacheKeepsEveryRow() {
        let cache = KVCacheSimple()
        cache.step = 4
        var all: [Float] = []
        for length in [3, 1, 1, 6, 1] {
            let new = (0..<length).map { Float(all.count + $0) }
            all += new
            let rows = MLXArray(new, [1, 1, length, 1])
            let (keys, values) = cache.update(keys: rows, values: rows)
            #expect(keys.asArray(Float.self) == all)
            #expect(values.shape == [1, 1, all.count, 1])
        }
        let copy = cache.copy()
        let zero = MLXArray.zeros([1, 1, 1, 1], dtype: .float32)
        _ = cache.update(keys: zero, values: zero)
        #expect(copy.offset == 12)
        #expect(copy.trim(2) == 2)
        #expect(copy.offset == 10)
    }

    @Test func causalMasksAreBottomRightAligned() throws {
        let mask = createCausalMask(n: 2, offset: 1)
        #expect(mask.asArray(Bool.self) == [true, true, false, true, true, true])
        let windowed = createCausalMask(n: 2, offset: 1, windowSize: 1)
        #expect(windowed.asArray(Bool.self) == [false, true, false, false, false, true])
    }
}
