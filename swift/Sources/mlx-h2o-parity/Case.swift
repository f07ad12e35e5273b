import Foundation
import MLX
import MLXH2O

/// One case of a file: its metadata and its tensors.
struct Case {
    struct Fields: Decodable {
        let name: String
        let op: String
        let scale: Float?
        let mask: String?
        let returnLse: Bool?
        let slack: Int?
        let keep: Int?
        let count: Int?
        let sinkSize: Int?
        let recentStart: Int?
        let heavySize: Int?
        let recentSize: Int?
        let maxKvSize: Int?
        let policy: String?
        let decay: Double?
        let prefill: [Int]?
        let steps: Int?
        /// Instead of `prefill` and `steps`: tokens per update, and how many are taken back.
        let rounds: [[Int]]?
        let speculative: Int?
        /// Where the cache is loaded from, and where it is saved at the end.
        let load: String?
        let save: String?
        let replay: Bool?
        let routed: Bool?
        let evictEvery: Int?
        let contextSize: Int?
        let rowsAt: [[Int]]?
        let shared: Bool?
        let kvBits: Int?
        let kvFrame: Bool?
        let vBits: Int?
        let denseSize: Int?
        let kvGroupSize: Int?
        let kvFormat: String?
        let fold: Bool?
        let bits: [Int]?
        let groupSize: Int?
        let sparseVThreshold: Float?
        let kind: String?
        let share: Double?
        let queries: Int?
        /// Largest allowed error of each result.
        let tolerance: [String: Float]?
    }

    struct Malformed: Error, CustomStringConvertible {
        let description: String
    }

    let fields: Fields
    private let tensors: [String: MLXArray]

    var name: String { fields.name }

    /// The cases of a file, in order.
    static func read(_ url: URL) throws -> [Case] {
        let (tensors, metadata) = try loadArraysAndMetadata(url: url)
        guard let list = metadata["cases"] else {
            throw Malformed(description: "\(url.lastPathComponent) has no metadata 'cases'")
        }
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        return try decoder.decode([Fields].self, from: Data(list.utf8)).map {
            Case(fields: $0, tensors: tensors)
        }
    }

    func optionalTensor(_ part: String) -> MLXArray? { tensors["\(name)/\(part)"] }

    func tensor(_ part: String) throws -> MLXArray {
        guard let array = optionalTensor(part) else {
            throw Malformed(description: "there is no tensor '\(name)/\(part)'")
        }
        return array
    }

    /// The rows of the case, without the slack behind views, which nothing may read.
    func rows(_ part: String) throws -> MLXArray {
        let array = try tensor(part)
        return array[0..., 0..., ..<(array.dim(2) - (fields.slack ?? 0))]
    }

    func packedRows(_ side: String) throws -> PackedRows {
        PackedRows(
            words: try rows("\(side)_words"), scales: try rows("\(side)_scales"),
            biases: try rows("\(side)_biases"))
    }

    /// Keys or values, in as many arrays as the case has for them.
    func storedRows(_ side: String) throws -> StoredRows {
        for count in 1...3 where optionalTensor(partNames(side, count)[count - 1]) != nil {
            return StoredRows(parts: try partNames(side, count).map { try rows($0) })
        }
        throw Malformed(description: "there are no '\(name)/\(side)'")
    }

    func recentStart() -> (any PerSequence)? {
        optionalTensor("recent_start") ?? fields.recentStart
    }

    func mask() throws -> MLXFast.ScaledDotProductAttentionMaskMode {
        switch fields.mask {
        case "causal": .causal
        case "array": .array(try tensor("mask"))
        default: .none
        }
    }

    /// Bits of keys and of values, and the group size.
    func packing() throws -> (bits: Int, valueBits: Int, groupSize: Int) {
        guard let bits = fields.bits, bits.count == 2 else {
            throw Malformed(description: "bits are missing")
        }
        return (bits[0], bits[1], try field(\.groupSize, "group_size"))
    }

    /// A field that this kind of case must have.
    func field<T>(_ path: KeyPath<Fields, T?>, _ what: String) throws -> T {
        guard let value = fields[keyPath: path] else {
            throw Malformed(description: "\(what) is missing")
        }
        return value
    }
}

/// Rows in any format.
struct StoredRows: CacheRows {
    let parts: [MLXArray]

    static func rows(of parts: [MLXArray]) -> StoredRows { StoredRows(parts: parts) }

    /// Under the names of their arrays; floats as float32.
    func named(_ side: String) -> [String: MLXArray] {
        let floats = parts.map { $0.dtype == .uint32 ? $0 : $0.asType(.float32) }
        return Dictionary(uniqueKeysWithValues: zip(partNames(side, parts.count), floats))
    }
}

/// The names in a file of this many arrays of keys or values.
private func partNames(_ side: String, _ count: Int) -> [String] {
    [[""], ["_words", "_norms"], ["_words", "_scales", "_biases"]][count - 1].map { side + $0 }
}
