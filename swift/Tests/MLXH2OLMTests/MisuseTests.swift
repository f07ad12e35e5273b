import Foundation
import MLX
import MLXH2O
import MLXH2OLM
import MLXLMCommon
import Testing

/// Mistakes end with a thrown error or with one that `withError` throws. Each runs in a process of
/// its own, which a trap would end by a signal.
@Suite struct MisuseTests {
    @Test func settingsOfAnySize() async {
        await #expect(processExitsWith: .success) {
            for most in [Int.max, Int.min, Int(Int32.max) + 1] {
                try refused { try H2OConfiguration(.init(most)) }
                try refused { try H2OConfiguration(.init(sinkSize: most)) }
                try refused { try H2OConfiguration(.init(heavySize: most)) }
                try refused { try H2OConfiguration(.init(recentSize: most)) }
                try refused { try H2OConfiguration(.init(evictEvery: most)) }
                try refused { try H2OConfiguration(.init(speculative: most)) }
                try refused { try H2OConfiguration(.init(), .affine(most)) }
                try refused { try H2OConfiguration(.init(), .affine(8, groupSize: most)) }
                try refused { try H2OConfiguration(.init(nil), .affine(8, denseSize: most)) }
                try refused { try H2OConfiguration(preset: .heavy, maxKVSize: most) }
            }
            for decay in [Double.nan, .infinity, -1] {
                try refused { try H2OConfiguration(policy: .init(.keydiff, decay: decay)) }
            }
        }
    }

    @Test func theLargestBudgets() async {
        await #expect(processExitsWith: .success) {
            let most = 1 << 30
            for settings in try [
                H2OConfiguration(.init(most, evictEvery: most)),
                H2OConfiguration(.init(most, speculative: most - 6)),
                H2OConfiguration(.init(most), .affine(8)),
                H2OConfiguration(.init(evictEvery: most)),
            ] {
                let cache = evictingCache(settings)
                try withError {
                    for count in [1, 9, 1] {
                        _ = try cache.append(keys: rows(count), values: rows(count))
                    }
                    eval(cache.innerState())
                }
            }
        }
    }

    @Test func tokensBeyondThePositions() async {
        await #expect(processExitsWith: .success) {
            let cache = H2OKVCache(try H2OConfiguration())
            let places = [Int32.max - 1, .max, .min, -1]
            func set(_ place: Int32) {
                let scores = MLXArray.zeros([1, 2, 1], dtype: .float32)
                cache.state = [rows(1), rows(1), scores, MLXArray([place, place], [1, 2, 1])]
            }
            for place in places[1...] { try reported { set(place) } }
            try withError { set(places[0]) }
            // Two rows of one token.
            let twice = [
                MLXArray.zeros([1, 2, 2], dtype: .float32), .zeros([1, 2, 2], dtype: .int32),
            ]
            try reported { cache.state = [rows(2), rows(2)] + twice }
            let url = temporaryFile()
            try H2OKVCache.save([cache], to: url)
            try FileManager.default.removeItem(at: url)
            try refused { try cache.append(keys: rows(1), values: rows(1)) }
            try reported { _ = cache.update(keys: rows(3), values: rows(3)) }
        }
    }

    @Test func filesThatWereChanged() async {
        await #expect(processExitsWith: .success) {
            let url = temporaryFile()
            defer { try? FileManager.default.removeItem(at: url) }
            let settings = try H2OConfiguration(.init(16, speculative: 2), policy: .h2oEma)
            let cache = H2OKVCache(settings)
            try withError { eval(attend(Tokens(count: 9, seed: 1), 0..<9, cache)) }
            try H2OKVCache.save([cache], to: url)
            let (whole, texts) = try contents(of: url)
            func number(_ value: Float) -> MLXArray { MLXArray(value).asType(.int64) }
            func text(_ text: String) -> MLXArray {
                MLXArray(text.unicodeScalars.map { Int32($0.value) })
            }
            let damages: [(String, MLXArray?)] = [
                ("0.4", number(3e9)), ("0.4", number(-1)), ("0.4", number(1)), ("0.4", nil),
                ("0.5", number(3e9)), ("0.5", number(-4)), ("0.6", MLXArray([Float(1), 2])),
                ("0.3", MLXArray.zeros([1, 2, 9], dtype: .int32)),
                ("0.3", whole["0.3"].map { $0 + Int32(1) }), ("0.3", nil), ("0.2", nil),
                ("0.2", MLXArray.zeros([1, 2, 8], dtype: .float32)), ("0.1", nil),
                ("0.0", whole["0.0"]?.asType(.int32)), ("0.0", MLXArray(Float(1))),
                ("0.8", text("{}")), ("0.8", text("no JSON")), ("0.8", nil),
                ("0.8", MLXArray([Int32(-1), 0x11_0000])),
                ("0.8", text(#"{"max_kv_size": 99999999999999999999}"#)),
                ("0.10", text("[[0, 9223372036854775807]]")), ("0.10", text("[[7, 2]]")),
                ("0.9", MLXArray.zeros([1, 3, 3, 9], dtype: .float32)),
            ]
            for (part, array) in damages {
                var arrays = whole
                arrays[part] = array
                try save(arrays: arrays, metadata: texts, url: url)
                try refused(part) { try H2OKVCache.load(from: url) }
            }
            for (key, value) in [
                ("1.0", "KVCache"), ("1.0", "QuantizedH2OKVCache"), ("1.1", "H2OKVCache"),
                ("0.mlx_h2o", "{}"), ("0.mlx_h2o", #"{"format": 7, "layers": 1}"#),
                ("0.mlx_h2o", #"{"format": 1, "layers": 2}"#),
            ] {
                try save(arrays: whole, metadata: texts.merging([key: value]) { $1 }, url: url)
                try refused(key) { try H2OKVCache.load(from: url) }
            }
            try save(arrays: whole, metadata: texts, url: url)
            _ = try H2OKVCache.load(from: url)
        }
    }

    /// Of values that are kept in more elements, and of their centre, which files of earlier versions
    /// do not have.
    @Test func sizesOfValuesThatWereChanged() async {
        await #expect(processExitsWith: .success) {
            let url = temporaryFile()
            defer { try? FileManager.default.removeItem(at: url) }
            let cache = evictingCache(try H2OConfiguration(.init(16), .affine(8)))
            let rows = MLXArray.zeros([1, 2, 3, 80], dtype: .float32)
            _ = try cache.append(keys: rows, values: rows)
            try H2OKVCache.save([cache], to: url)
            var (arrays, texts) = try contents(of: url)
            let written = arrays["0.8"]
            func write(_ size: Int) throws {
                arrays["0.8"] = settings(written, withValueSize: size)
                try save(arrays: arrays, metadata: texts, url: url)
            }
            for centre in [arrays["0.1.3"], nil] {
                arrays["0.1.3"] = centre
                for size in [Int.max, Int.min, -1, 0, 64, 97] {
                    try write(size)
                    try refused("\(size)") { try H2OKVCache.load(from: url) }
                }
                try write(80)
                _ = try H2OKVCache.load(from: url)
            }
            for shape in [
                [1, 2, 1, 64], [1, 2, 1, 97], [1, 2, 2, 80], [1, 1, 1, 80], [2, 1, 80],
            ] {
                arrays["0.1.3"] = MLXArray.zeros(shape, dtype: .float32)
                try write(shape[shape.count - 1])
                try refused("\(shape)") { try H2OKVCache.load(from: url) }
            }
            arrays["0.1.3"] = MLXArray.zeros([1, 2, 1, 80], dtype: .float16)
            try write(80)
            try refused("float16") { try H2OKVCache.load(from: url) }
        }
    }

    @Test func callsOutOfRange() async {
        await #expect(processExitsWith: .success) {
            let cache = H2OKVCache(try H2OConfiguration(.init(8)))
            try withError { _ = cache.update(keys: rows(12), values: rows(12)) }
            for n in [0, -1, Int.min, Int.max, Int(Int32.max)] {
                try reported { _ = cache.makeMask(n: n, windowSize: nil, returnArray: true) }
            }
            for n in [Int.max, 12] { try reported { _ = cache.trim(n) } }
            for n in [0, -1, Int.min] { try withError { _ = cache.trim(n) } }
            try refused { try cache.append(keys: rows(1), values: rows(1, .int32)) }
            try refused {
                try H2OKVCache(H2OConfiguration()).append(keys: rows(1, .bool), values: rows(1))
            }
            try refused { try cache.accumulate(MLXArray(Float(1))) }
            for diversity in [Double.nan, 1e30, -1] {
                let cache = H2OKVCache(
                    try H2OConfiguration(.init(8)), policy: H2OPolicy(diversity: diversity))
                try withError { eval(attend(Tokens(count: 9, seed: 1), 0..<9, cache)) }
                try refused("\(diversity)") { try cache.flush() }
            }
            let far = PolicyRows(
                keys: rows(2), values: rows(2), importance: .zeros([1, 2, 2], dtype: .float32),
                positions: .zeros([1, 2, 2], dtype: .int32), offset: Int.max, keep: 1)
            _ = try H2OPolicy().rank(far)
            try reported { cache.state = [MLXArray(Float(1))] }
            try reported { cache.metaState = ["1", "2"] }
            try refused { try H2OKVCache.save([], to: URL(fileURLWithPath: "/none/a.safetensors")) }
            try refused {
                try H2OKVCache.save([cache], to: URL(fileURLWithPath: "/none/a.safetensors"))
            }
            let folder = FileManager.default.temporaryDirectory
            for (name, metadata) in [
                ("a.txt", "a"), ("a.safetensors", "a.b"), ("a.safetensors", ""),
            ] {
                try refused {
                    try H2OKVCache.save(
                        [cache], to: folder.appending(path: name), metadata: [metadata: ""])
                }
            }
            try refused { try H2OKVCache.load(from: URL(fileURLWithPath: "/none/a.safetensors")) }
            // A routed function with queries that are none.
            for shape in [[1], [1, 3, 1, 32], [1, 4, 1, 16], [2, 4, 2, 32]] {
                try reported {
                    eval(
                        MLXH2OLM.attentionWithCacheUpdate(
                            queries: MLXArray.zeros(shape, dtype: .float32), keys: rows(1),
                            values: rows(1), cache: cache, scale: 1))
                }
            }
        }
    }

    /// mlx-swift-lm asks these of every cache.
    @Test func upstreamFunctions() async {
        await #expect(processExitsWith: .success) {
            let cache = H2OKVCache(try H2OConfiguration(.init(8)))
            try withError { _ = cache.update(keys: rows(12), values: rows(12)) }
            guard !cache.isTrimmable, cache.metaState.isEmpty, cache.state.count == 4 else {
                throw Unrefused(description: "what upstream asks")
            }
            let copy = cache.copy()
            copy.prepare(lengths: [3])
            copy.finalize()
        }
    }
}

private struct Unrefused: Error, CustomStringConvertible {
    let description: String
}

/// `body` must throw.
private func refused<R>(_ what: String = "a call", _ body: () throws -> R) throws {
    guard (try? body()) != nil else { return }
    throw Unrefused(description: "\(what) went through")
}

/// `body` must report an error, which `withError` throws.
private func reported(_ body: () throws -> Void) throws {
    try refused { try withError { try body() } }
}

private func rows(_ count: Int, _ dtype: DType = .float32) -> MLXArray {
    MLXArray.zeros([1, 2, count, 32], dtype: dtype)
}
