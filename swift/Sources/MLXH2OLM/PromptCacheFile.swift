import Foundation
import MLX
import MLXH2O

/// Arrays and texts of a prompt cache, by layer, or group of a layer ("3.1"), and part.
struct PromptCacheFile {
    var arrays: [String: MLXArray] = [:]
    var classes: [String] = []
    private(set) var metadata: [String: String] = [:]
    /// Parts that are not arrays, and their kinds.
    private var kinds: [(part: String, kind: String)] = []
    /// What Python says of the model that the rows belong to, as JSON.
    private(set) var facts: [String: String] = [:]
    private let name: String

    /// Files of a later format are refused. Raised when older readers would misread a file.
    private static let format = 6
    private static let entry = "mlx_h2o"

    private struct Description: Decodable {
        let format: Int
        let layers: Int
        let facts: [String: String]?
    }

    init() { name = "" }

    func unfit(_ problem: String) -> H2OError {
        H2OError("H2OKVCache.load", "\(name): \(problem).")
    }

    // MARK: Writing

    mutating func set(_ layer: String, _ part: Int, _ array: MLXArray, _ kind: String) {
        arrays["\(layer).\(part)"] = array
        kinds.append(("\(layer).\(part)", kind))
    }

    mutating func setNone(_ layer: String, _ part: Int) {
        set(layer, part, MLXArray.zeros([0], dtype: .float32), "none")
    }

    mutating func set(_ layer: String, _ part: Int, _ text: String) {
        let scalars = text.unicodeScalars.map { Int32($0.value) }
        set(layer, part, MLXArray(scalars, [scalars.count]), "string")
    }

    mutating func set(_ layer: String, _ part: Int, json: some Encodable) throws {
        set(layer, part, String(decoding: try JSONEncoder().encode(json), as: UTF8.self))
    }

    func write(to url: URL, _ metadata: [String: String]) throws {
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
        texts["0.\(Self.entry)"] = #"{"format": \#(Self.format), "layers": \#(classes.count)}"#
        for (layer, name) in classes.enumerated() { texts["1.\(layer)"] = name }
        for (index, (part, kind)) in kinds.enumerated() {
            (texts["2.\(index + 1).0"], texts["2.\(index + 1).1"]) = (part, kind)
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
        let (arrays, texts) = try withError {
            let read = try loadArraysAndMetadata(url: url)
            eval(Array(read.0.values))
            return read
        }
        self.arrays = arrays
        while let name = texts["1.\(classes.count)"] { classes.append(name) }
        if classes.isEmpty { throw unfit("is not a prompt cache: it names no cache classes") }
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
        facts = found.facts ?? [:]
    }

    /// The arrays of keys or values, packed or not, including the newest rows and the centre, or the
    /// single array of another part; empty if there is none.
    func rows(_ layer: String, _ part: Int) -> [MLXArray] {
        let packed = (0..<5).compactMap { arrays["\(layer).\(part).\($0)"] }
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
        let array = arrays["\(layer).\(part)"].flatMap { $0.size < 1 << 20 ? $0 : nil }
        let numbers = array.map { $0.size == 0 ? [] : $0.asType(.int32).asArray(Int32.self) }
        let scalars = numbers?.compactMap { UInt32(exactly: $0).flatMap(Unicode.Scalar.init) }
        guard let scalars, scalars.count == numbers?.count else {
            throw unfit("layer \(layer) has no text as its part \(part)")
        }
        return String(String.UnicodeScalarView(scalars))
    }

    /// The KV heads and the classes of a layer's groups.
    struct Groups: Codable {
        /// The class name of groups in files.
        static let name = "HeadGroups"
        let heads: [[Int]]
        let classes: [String]
    }

    /// `what` a text holds as JSON.
    func json<T: Decodable>(_ layer: String, _ part: Int, _ what: String) throws -> T {
        let text = try text(layer, part)
        do {
            return try JSONDecoder().decode(T.self, from: Data(text.utf8))
        } catch let error as H2OError {
            throw unfit("layer \(layer): \(error.description)")
        } catch {
            throw unfit("layer \(layer) has \(what) that cannot be read: \(text)")
        }
    }
}
