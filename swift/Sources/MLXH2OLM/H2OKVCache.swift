import MLX
import MLXH2O
import MLXLMCommon

/// Keys and values of one layer, dense or quantised, at most `configuration.maxKVSize` rows per head
/// at rest.
///
/// `offset` counts the tokens seen and drives RoPE; ``size`` counts the rows stored (AtomGradient
/// 2026, section 3.3). With `configuration.kvBits` the rows are quantised: see
/// ``QuantizedH2OKVCache``. Each (sequence, KV head) chooses its rows by itself, unless
/// `configuration.sharedHeads`. Below the budget the rows are in order; after evictions their order in memory means nothing, except that the rows of
/// the last multi-token update are the last ones, in order.
///
/// A step is: evict on the scores so far, append, attend, take in the scores. Nothing is evaluated
/// here, ever. Members of the protocol `KVCache` cannot throw: they report to MLX's error handler,
/// so that `withError` throws; ``append(keys:values:)`` and ``accumulate(_:isMasked:)`` throw
/// themselves.
public class H2OKVCache {
    public internal(set) var configuration: H2OConfiguration
    /// What error messages call this cache, such as "qwen3 layer 3".
    public internal(set) var name: String
    /// Tokens seen: the position of the next one.
    public internal(set) var offset = 0
    /// Rows evicted per head so far.
    public internal(set) var evicted = 0

    var policy: any EvictionPolicy
    var store: RowStore?
    /// The last update still waits for its scores.
    var isUnscored = false
    /// Rows of a chunk beyond the budget, to go at the next occasion.
    var hasSurplus = false
    /// In the place of ``KeyRanks/secondReadBytes(evictEvery:)``; only in tests.
    var secondReadBytes: Int?

    public init(_ configuration: H2OConfiguration, name: String = "") {
        self.configuration = configuration
        self.name = name
        policy = configuration.makePolicy()
    }

    /// As ``init(_:name:)``, with the default settings of ``H2OConfiguration``.
    ///
    /// - Throws: `H2OError` where the settings do not fit
    public convenience init(maxKVSize: Int = 256, name: String = "") throws {
        self.init(try H2OConfiguration(maxKVSize: maxKVSize), name: name)
    }

    /// Evict what must go, append the new rows and return all rows for attention.
    ///
    /// One token at the full budget overwrites the row that goes, in each head its own slot.
    /// Several tokens are stored behind the others, in order, so that bottom-right causal masks
    /// fit, and what is then beyond the budget goes at the next occasion: an update, `state`,
    /// ``size``, ``nbytes`` or a copy.
    ///
    /// - Parameters:
    ///   - keys: [B, H, L, D] with RoPE applied, L at least 1
    ///   - values: [B, H, L, Dv]
    /// - Returns: keys [B, H, N, D] and values [B, H, N, Dv]; for L > 1 the new rows are the last
    /// - Throws: `H2OError` where the rows do not fit each other or the stored ones, or the policy
    ///   needs scores and the last update got none
    public func append(keys: MLXArray, values: MLXArray) throws -> (MLXArray, MLXArray) {
        try appendRows(keys, values)
        guard let store else { return (.mlxNone, .mlxNone) }
        let (keys, values) = store.dense()
        return (tied(keys), values)
    }

    /// The same without handing out the rows.
    func appendRows(_ keys: MLXArray, _ values: MLXArray) throws {
        try checkRows(keys: keys, values: values, against: store)
        try checkScored()
        try settle()
        let added = keys.dim(2)
        store = try appended(keys, values, to: store ?? emptyStore(for: keys, values))
        offset += added
        hasSurplus = added > 1 && length > configuration.maxKVSize
        isUnscored = policy.needsScores
    }

    private func emptyStore(for keys: MLXArray, _ values: MLXArray) throws -> RowStore {
        let packing = try RowPacking(
            configuration, keySize: keys.dim(3), valueSize: values.dim(3), owner: described)
        return RowStore(emptyLike: keys, values, packing: packing)
    }

    /// The keys, such that evaluating them evaluates what is remembered of the rows: otherwise the
    /// graph of every step would hang on that until the first eviction.
    func tied(_ keys: MLXArray) -> MLXArray {
        depends(input: keys, dependencies: trackedState)
    }

    /// Take in the scores of the attention that followed an update. Policies that need none ignore
    /// them.
    ///
    /// - Parameters:
    ///   - scores: float32 [B, Hq, L, N], logits before the softmax, -inf where masked, the queries
    ///     in order, N the rows stored. How many count, from the end, is the policy's choice
    ///   - lse: float32 [B, Hq, L], where the policy wants weights, `exp(scores - lse)`; nil: of
    ///     these scores, which is right for attention without sinks
    ///   - isMasked: false promises that no score is -inf, which saves work
    /// - Throws: `H2OError` where there are no rows yet, or an argument has another shape or dtype
    public func accumulate(
        _ scores: MLXArray, lse: MLXArray? = nil, isMasked: Bool = true
    ) throws {
        var store = try checkScores(scores, lse, against: store)
        store.importance = try policy.importance(
            of: store, scores: scores, lse: lse, isMasked: isMasked)
        self.store = store
        isUnscored = false
    }

    /// float32 [B, H, N]: what the policy accumulated for each row, NaN before its first score.
    public var scores: MLXArray? { store?.importance }

    /// int32 [B, H, N]: the place of each stored row in the sequence.
    public var positions: MLXArray? { store?.positions }

    /// The stored keys [B, H, N, D]; quantised ones dequantised.
    public var keys: MLXArray? { store?.dense().keys }

    /// The stored values [B, H, N, Dv]; quantised ones dequantised.
    public var values: MLXArray? { store?.dense().values }

    /// Rows stored per head, after the surplus of a chunk has gone.
    public var size: Int {
        settleOrReport()
        return length
    }

    /// Bytes stored, after the surplus of a chunk has gone: keys, values, scores, positions, and
    /// what attention has found out of the rows for the next step.
    public var nbytes: Int {
        settleOrReport()
        return store?.nbytes ?? 0
    }

    private var length: Int { store?.length ?? 0 }

    // MARK: Eviction

    /// Rows at which a single-token step evicts.
    private var limit: Int { configuration.maxKVSize + configuration.evictEvery - 1 }

    private func appended(
        _ keys: MLXArray, _ values: MLXArray, to store: RowStore
    ) throws -> RowStore {
        var store = store
        let added = keys.dim(2)
        if added > 1 {
            store = try compacted(store, keep: configuration.maxKVSize, added: added)
        } else if store.length >= limit {
            if configuration.evictEvery == 1 {
                let ranks = try ranking(of: store)
                try store.replaceWorst(
                    keys, values, position: offset, zones: zones(added: added), ranks: ranks)
                evicted += 1
                return store
            }
            store = try compacted(store, keep: configuration.maxKVSize - 1, added: added)
        }
        try store.append(keys, values, offset: offset, limit: limit)
        return store
    }

    /// The best `keep` rows of each head, in the order of their slots.
    private func compacted(_ store: RowStore, keep: Int, added: Int) throws -> RowStore {
        guard store.length > keep else { return store }
        var kept = store
        if keep == 0 {
            kept.truncate(to: 0)
        } else {
            let zones = zones(added: added)
            let ranks = try ranks(of: store)
            let slots = try keepIndices(
                ranks, positions: store.positions, keep: keep, sinkSize: zones.sinkSize,
                recentStart: zones.recentStart)
            let gone =
                try !store.areRanked
                ? nil
                : evictIndices(
                    ranks, positions: store.positions, count: store.length - keep,
                    sinkSize: zones.sinkSize, recentStart: zones.recentStart)
            try kept.keep(slots, gone: gone)
        }
        evicted += store.length - keep
        return kept
    }

    /// What is protected when `added` tokens are appended at `offset`.
    func zones(added: Int) -> Zones {
        Zones(
            sinkSize: configuration.sinkSize,
            recentStart: offset + added - configuration.recentSize)
    }

    /// Whether rows go with the next token, if it comes alone.
    var isEvictionDue: Bool { length >= limit }

    /// What the next row to go is found by: a rank that the operation knows, or the ranks.
    private func ranking(of store: RowStore) throws -> RowRanks {
        if store.areRanked { return .importance }
        let known = configuration.sharedHeads ? nil : policy.rankedBy
        return try known ?? .array(ranks(of: store))
    }

    private func ranks(of store: RowStore) throws -> MLXArray {
        if store.areRanked { return store.importance }
        let (keys, values) = store.dense()
        let ranks = try policy.rank(
            PolicyRows(
                keys: keys, values: values, importance: store.importance,
                positions: store.positions, offset: offset))
        return configuration.sharedHeads ? sharedByHeads(ranks) : ranks
    }

    /// Let the surplus of the last chunk go, with the recent window as it is at rest.
    func settle() throws {
        guard hasSurplus, let store else { return }
        try checkScored()
        self.store = try compacted(store, keep: configuration.maxKVSize, added: 0)
        hasSurplus = false
    }

    func settleOrReport() {
        do { try settle() } catch { H2OError.report(error) }
    }

    private func checkScored() throws {
        guard isUnscored else { return }
        throw H2OError(
            "H2OKVCache",
            "\(described) got no scores for its last update, and the policy "
                + "'\(configuration.policy.rawValue)' needs them: call "
                + "MLXH2OLM.attentionWithCacheUpdate in the model, or choose a policy that needs none."
        )
    }

    var described: String { name.isEmpty ? "this cache" : "the cache of \(name)" }
}
