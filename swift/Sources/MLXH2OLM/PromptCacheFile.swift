import Foundation
import MLX
import MLXH2O

/// Arrays and texts of a prompt cache, by layer, or group of a layer ("3.1"), and part.
struct PromptCacheFile {
    var arrays: [String: MLXArray] = [:]
    var classes: [String] = []
    private(set) var metadata: [String: String] = [:]
    private var others: [(part: String, kind: String)] = []
    private let name: String

    /// Files of a later format are refused.
    private static let format = 5
    private static let entry = "mlx_h2o"

    private struct Description: Codable {
        let format: Int
        let layers: Int
    }

    init() { name = "" }

    func unfit(_ problem: String) -> H2OError {
        H2OError("H2OKVCache.load", "\(name): \(problem).")
    }

    // MARK: Writing

    mutating func set(_ layer: String, _ part: Int, _ array: MLXArray, _ kind: String) {
        arrays["\(layer).\(part)"] = array
        others.append(("\(layer).\(part)", kind))
    }

    mutating func set(_ layer: String, _ part: Int, _ text: String) {
        let scalars = text.unicodeScalars.map { Int32($0.value) }
        set(layer, part, MLXArray(scalars, [scalars.count]), "string")
    }

    mutating func set(_ layer: String, _ part: Int, json: some Encodable) throws {
        set(layer, part, String(decoding: try JSONEncoder().encode(json), as: UTF8.self))
    }

    func write(to url: URL, _ metadata: [String: String], format: Int) throws {
        var texts = ["2.0": ""]
        for (name, text) in metadata {
            guard !name.contains("."), name != Self.entry, !name.isEmpty else {
                throw H2OError(
                    "H2OKVCache.save",
                    "metadata is named '\(name)', expected a name without dots, not '\(Self.entry)'."
                )
            }
            texts["0.\(name)"] = text
        }
        let description = Description(format: format, layers: classes.count)
        texts["0.\(Self.entry)"] = String(
            decoding: try JSONEncoder().encode(description), as: UTF8.self)
        for (layer, name) in classes.enumerated() { texts["1.\(layer)"] = name }
        for (index, other) in others.enumerated() {
            texts["2.\(index + 1).0"] = other.part
            texts["2.\(index + 1).1"] = other.kind
        }
        let beside = url.deletingLastPathComponent().appending(
            path: ".\(url.lastPathComponent).\(UUID().uuidString).safetensors")
        defer { try? FileManager.default.removeItem(at: beside) }
        // Only for this user: it holds a conversation. If this fails, so does the writing below.
        _ = FileManager.default.createFile(
            atPath: beside.path, contents: nil, attributes: [.posixPermissions: 0o600])
        try withError { try save(arrays: arrays, metadata: texts, url: beside) }
        guard rename(beside.path, url.path) == 0 else {
            throw H2OError(
                "H2OKVCache.save",
                "\(url.path) cannot be written: \(String(cString: strerror(errno))).")
        }
    }

    // MARK: Reading

    init(contentsOf url: URL) throws {
        name = url.lastPathComponent
        var read: ([String: MLXArray], [String: String]) = ([:], [:])
        try withError {
            read = try loadArraysAndMetadata(url: url)
            eval(Array(read.0.values))
        }
        arrays = read.0
        let texts = read.1
        while let name = texts["1.\(classes.count)"] { classes.append(name) }
        guard !classes.isEmpty else { throw unfit("is no prompt cache: it names no cache classes") }
        for (key, text) in texts where key.hasPrefix("0.") {
            metadata[String(key.dropFirst(2))] = text
        }
        // Files written by mlx_lm itself have no description.
        guard let text = metadata.removeValue(forKey: Self.entry) else { return }
        guard
            let found = try? JSONDecoder().decode(Description.self, from: Data(text.utf8))
        else { throw unfit("has a damaged entry '\(Self.entry)': \(text)") }
        guard (1...Self.format).contains(found.format) else {
            throw unfit("has format \(found.format), expected at most \(Self.format)")
        }
        guard found.layers == classes.count else {
            throw unfit("holds \(classes.count) layers, expected \(found.layers)")
        }
    }

    /// The arrays of keys or values, packed or not, including a centre, or the single array of
    /// another part; empty if there is none.
    func rows(_ layer: String, _ part: Int) -> [MLXArray] {
        let packed = (0..<4).compactMap { arrays["\(layer).\(part).\($0)"] }
        return packed.isEmpty
            ? [arrays["\(layer).\(part)"]].compactMap { $0 }.filter { $0.ndim > 1 } : packed
    }

    func number(_ layer: String, _ part: Int) throws -> Int {
        guard let array = arrays["\(layer).\(part)"], array.size == 1,
            [.int32, .int64, .bool].contains(array.dtype)
        else { throw unfit("layer \(layer) has no whole number as its part \(part)") }
        return array.reshaped(1).asType(.int64).asArray(Int.self)[0]
    }

    func text(_ layer: String, _ part: Int) throws -> String {
        guard let array = arrays["\(layer).\(part)"], array.size < 1 << 20 else {
            throw unfit("layer \(layer) has no text as its part \(part)")
        }
        guard array.size > 0 else { return "" }
        var text = String.UnicodeScalarView()
        for number in array.asType(.int32).asArray(Int32.self) {
            guard let scalar = UInt32(exactly: number).flatMap(Unicode.Scalar.init) else {
                throw unfit("layer \(layer) has no text as its part \(part)")
            }
            text.append(scalar)
        }
        return String(text)
    }

    /// The dtype of coded rows, and the original size of padded values, from the settings.
    func sizes(_ layer: String) throws -> (dtype: DType, valueSize: Int?) {
        struct Settings: Decodable {
            let dtype: String?
            let valueSize: Int?
        }
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        let found = try decoder.decode(Settings.self, from: Data(text(layer, 8).utf8))
        let dtype = [DType.float16, .bfloat16].first { "\($0)" == found.dtype } ?? .float32
        return (dtype, found.valueSize)
    }

    /// The KV heads and the classes of a layer's groups.
    struct Groups: Codable {
        /// The class name of groups in files.
        static let name = "HeadGroups"
        let heads: [[Int]]
        let classes: [String]
    }

    func groups(_ layer: String) throws -> Groups {
        let text = try text(layer, 0)
        guard let found = try? JSONDecoder().decode(Groups.self, from: Data(text.utf8)) else {
            throw unfit("layer \(layer) has groups of KV heads that cannot be read: \(text)")
        }
        return found
    }

    func settings(_ layer: String) throws -> H2OConfiguration {
        let text = try text(layer, 8)
        do {
            return try JSONDecoder().decode(H2OConfiguration.self, from: Data(text.utf8))
        } catch let error as H2OError {
            throw unfit("layer \(layer): \(error.description)")
        } catch {
            throw unfit("layer \(layer) has settings that cannot be read: \(text)")
        }
    }
}
