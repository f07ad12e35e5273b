import MLX
import MLXH2O
import MLXLMCommon

/// The KV heads of one layer in groups, each group with its own number of rows.
///
/// A cache holds equally many rows of every head, so heads with different needs go to two caches.
/// ``attentionWithCacheUpdate(queries:keys:values:cache:scale:mask:)`` of this module attends once
/// for each, and puts the outputs back in the order of the heads. Other attention cannot: models
/// must be ``H2ORouted``. An update that fails changes nothing.
public final class HeadGroupsKVCache: KVCache {
    /// One for each group.
    public let caches: [H2OKVCache]
    /// The KV heads of each group, ascending.
    public let heads: [[Int]]
    private let indices: [MLXArray]
    /// The places of the heads in the concatenated groups.
    private let order: MLXArray

    /// - Parameters:
    ///   - caches: one for each group
    ///   - heads: the KV heads of each group, ascending; together, every head once
    /// - Throws: `H2OError` if there is not one group per cache, if groups miss or repeat a head,
    ///   or if the caches have not seen the same tokens
    public init(_ caches: [H2OKVCache], heads: [[Int]]) throws {
        let given = heads.flatMap { $0 }
        let fits = zip(caches, heads).allSatisfy { cache, own in
            !own.isEmpty && own == own.sorted() && cache.offset == caches[0].offset
                && (cache.positions?.dim(1) ?? own.count) == own.count
        }
        guard !caches.isEmpty, caches.count == heads.count, fits,
            given.sorted() == Array(given.indices)
        else {
            throw H2OError(
                "HeadGroupsKVCache",
                "found \(caches.count) caches of the KV heads \(heads), which have seen "
                    + "\(caches.map(\.offset)) tokens, expected a group for each, in order, every "
                    + "head from 0 on in one of them, and the same tokens.")
        }
        self.caches = caches
        self.heads = heads
        indices = heads.map { MLXArray($0.map { Int32($0) }) }
        order = MLXArray(given.indices.sorted { given[$0] < given[$1] }.map { Int32($0) })
    }

    /// Append and attend, each group separately; returns all heads [B, Hq, L, Dv].
    func attend(
        _ queries: MLXArray, _ keys: MLXArray, _ values: MLXArray, _ scale: Float,
        _ mask: MLXFast.ScaledDotProductAttentionMaskMode
    ) throws -> MLXArray {
        let count = order.size
        guard [queries, keys, values].allSatisfy({ $0.ndim == 4 && $0.size > 0 }),
            keys.dim(1) == count, values.dim(1) == count, queries.dim(1) % count == 0
        else {
            throw H2OError(
                "HeadGroupsKVCache.update",
                "queries, keys and values have shapes \(queries.shape), \(keys.shape) and "
                    + "\(values.shape), expected the \(count) KV heads that the budgets of "
                    + "\(caches[0].described) have, and queries of a multiple of them.")
        }
        func own(_ array: MLXArray, _ index: MLXArray) -> MLXArray {
            let shape = array.shape
            let heads = array.reshaped(shape[0], count, -1, shape[3])
            return take(heads, index, axis: 1).reshaped(shape[0], -1, shape[2], shape[3])
        }
        func own(_ index: MLXArray) -> MLXFast.ScaledDotProductAttentionMaskMode {
            guard case .array(let array) = mask, array.ndim > 2, array.dim(-3) == queries.dim(1)
            else { return mask }
            return .array(own(array.ndim > 3 ? array : array[.newAxis], index))
        }
        return try allOrNothing(caches) {
            let outputs = try zip(caches, indices).map { cache, index in
                try cache.attend(
                    own(queries, index), own(keys, index), own(values, index), scale, own(index))
            }
            return own(concatenated(outputs, axis: 1), order)
        }
    }

    private func report(_ operation: String, expected: String) {
        H2OError.report(
            H2OError(
                "HeadGroupsKVCache.\(operation)",
                "\(caches[0].described) and others have KV heads of unequal budgets: expected "
                    + "\(expected)."))
    }

    // MARK: KVCache

    public var offset: Int { caches[0].offset }

    /// Rows of the heads with the most.
    public var size: Int { caches.map(\.size).max() ?? 0 }

    /// Bytes of all groups.
    public var nbytes: Int { caches.reduce(0) { $0 + $1.nbytes } }

    /// The largest budget.
    public var maxSize: Int? { caches.compactMap(\.maxSize).max() }

    public func innerState() -> [MLXArray] { caches.flatMap { $0.innerState() } }

    /// As ``H2OKVCache/flush()``, for each group.
    public func flush() throws { for cache in caches { try cache.flush() } }

    /// Reports an error: heads with different numbers of rows do not fit one array.
    public func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        report(
            "update",
            expected: "a model that calls MLXH2OLM.attentionWithCacheUpdate, or a number of rows "
                + "for each layer")
        return (keys, values)
    }

    /// As in ``H2OKVCache``, but never an array, which would not fit all groups: asking for one is
    /// reported as an error.
    public func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        if returnArray, n != 1 { report("makeMask", expected: "returnArray = false") }
        return caches[0].makeMask(n: n, windowSize: windowSize, returnArray: false)
    }

    /// As in ``H2OKVCache``, for every group.
    public var isTrimmable: Bool { caches.allSatisfy(\.isTrimmable) }

    public func isTrimmable(after positions: Int) -> Bool {
        caches.allSatisfy { $0.isTrimmable(after: positions) }
    }

    /// As ``H2OKVCache/trim(_:)``. If one group refuses, nothing changes.
    @discardableResult
    public func trim(_ n: Int) -> Int {
        reported(else: 0) { try allOrNothing(caches) { try caches.map { try $0.takeBack(n) }[0] } }
    }

    public func copy() -> any KVCache {
        reported(else: self) { try HeadGroupsKVCache(caches.map { $0.duplicate() }, heads: heads) }
    }

    /// The state of each group, concatenated.
    public var state: [MLXArray] {
        get { caches.flatMap(\.state) }
        set {
            // Positions, the only int32 array, end each group.
            let places = newValue.indices.filter { newValue[$0].dtype == .int32 }.map { $0 + 1 }
            let ends = newValue.isEmpty ? caches.map { _ in 0 } : places
            guard ends.count == caches.count, ends.last == newValue.count else {
                return report(
                    "state",
                    expected: "the states of \(caches.count) groups, each with positions last, "
                        + "found \(places.count) such arrays of \(newValue.count)")
            }
            reported(else: ()) {
                try allOrNothing(caches) {
                    for (cache, (start, end)) in zip(caches, zip([0] + ends, ends)) {
                        try cache.hold(Array(newValue[start..<end]))
                    }
                }
            }
            let seen = caches.map(\.offset).max() ?? 0
            for cache in caches { cache.offset = seen }
        }
    }

    /// As in ``H2OKVCache``: empty.
    public var metaState: [String] {
        get { [] }
        set { caches[0].metaState = newValue }
    }
}
