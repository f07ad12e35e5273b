import Foundation
import MLXH2O
import MLXLMCommon

/// Rows of one layer: `24` for each of its KV heads, or one number per head, `[24, 8]`.
public enum LayerRows: Decodable, Equatable, Sendable, ExpressibleByIntegerLiteral,
    ExpressibleByArrayLiteral
{
    /// The same number for every KV head.
    case each(Int)
    /// One number per KV head, in order.
    case heads([Int])

    public init(integerLiteral rows: Int) { self = .each(rows) }

    public init(arrayLiteral rows: Int...) { self = .heads(rows) }

    public init(from decoder: any Decoder) throws {
        let value = try decoder.singleValueContainer()
        self = try (try? .each(value.decode(Int.self))) ?? .heads(value.decode([Int].self))
    }

    fileprivate var numbers: [Int] {
        switch self {
        case .each(let rows): [rows]
        case .heads(let rows): rows
        }
    }

    var mean: Double { Double(numbers.reduce(0, +)) / Double(max(1, numbers.count)) }

    var differ: Bool { Set(numbers).count > 1 }
}

/// The rows of each layer from a file of `mlx_h2o layers --output`: `{"budgets": [ROWS, ...]}`,
/// where ROWS is a number, or a list with one per KV head.
///
/// - Throws: `H2OError` if it holds none
public func rowsPerLayer(contentsOf url: URL) throws -> [LayerRows] {
    struct File: Decodable { let budgets: [LayerRows] }
    do {
        return try JSONDecoder().decode(File.self, from: Data(contentsOf: url)).budgets
    } catch {
        throw H2OError(
            "rowsPerLayer",
            "\(url.lastPathComponent) cannot be read, expected {\"budgets\": [ROWS, ...]}: \(error)."
        )
    }
}

/// Empty caches for a layer with these rows: one cache, or if KV heads differ, a
/// ``HeadGroupsKVCache`` with one cache for each number of rows, the fewest first. Heads with more
/// than `mean` rows drop evicted rows instead of folding them, which recalls more.
///
/// - Throws: `H2OError` if the rows do not suit the other settings, or there are none
public func evictingCache(
    _ configuration: H2OConfiguration, rows: LayerRows, mean: Double = .infinity,
    policy: (any EvictionPolicy)? = nil, name: String = ""
) throws -> any KVCache {
    let numbers = rows.numbers
    let groups = Dictionary(grouping: numbers.indices) { numbers[$0] }.sorted { $0.key < $1.key }
    let caches = try groups.map { rows, heads in
        let own =
            groups.count == 1 ? "" : " KV heads \(heads.map(String.init).joined(separator: ", "))"
        let found = try configuration.with(maxKVSize: rows, folds: Double(rows) <= mean)
        return evictingCache(found, policy: policy, name: name + own)
    }
    return caches.count == 1 ? caches[0] : try HeadGroupsKVCache(caches, heads: groups.map(\.value))
}
