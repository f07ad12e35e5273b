import Foundation
import MLX
import MLXH2O

/// One case of a file: what its metadata says of it, and its tensors.
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
        let replay: Bool?
        /// Largest error allowed of each result.
        let tolerance: [String: Float]?
    }

    struct Malformed: Error, CustomStringConvertible {
        let description: String
    }

    let fields: Fields
    private let tensors: [String: MLXArray]

    var name: String { fields.name }

    /// The cases of a file, in its order.
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

    /// A field that this kind of case must have.
    func field<T>(_ path: KeyPath<Fields, T?>, _ what: String) throws -> T {
        guard let value = fields[keyPath: path] else {
            throw Malformed(description: "\(what) is missing")
        }
        return value
    }
}
