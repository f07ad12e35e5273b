import MLX
import MLXH2O
import MLXLMCommon

/// Keys and values of one layer, dense or quantised, at most `configuration.maxKVSize` rows per head.
///
/// `offset` counts the tokens seen and drives RoPE; ``size`` counts the rows stored (AtomGradient
/// 2026, section 3.3). With `configuration.kvBits` the rows are quantised: see
/// ``QuantizedH2OKVCache``. Each (sequence, KV head) chooses its rows by itself, unless
/// `configuration.sharedHeads`. Below the budget the rows are in order; after evictions their order
/// in memory means nothing, except that the rows of the last update are the last ones, in order.
///
/// A step is: evict on the scores so far, append, attend, take in the scores. Nothing is evaluated
/// here, ever, and properties change nothing. Members of the protocol `KVCache` cannot throw: they
/// report to MLX's error handler, so that `withError` throws; ``append(keys:values:)``,
/// ``accumulate(_:lse:isMasked:)`` and ``flush()`` throw themselves.
public class H2OKVCache {
    public internal(set) var configuration: H2OConfiguration
    /// What error messages call this cache, such as "qwen3 layer 3".
    public internal(set) var name: String
    /// Tokens seen: the position of the next one.
    public internal(set) var offset = 0
    /// Rows evicted per head so far.
    public internal(set) var evicted = 0

    var policy: any EvictionPolicy
    var table: RowTable?
    /// The last update still waits for its scores, or for attention that counts merged rows.
    var isUnscored = false

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
    /// One token in a full cache lets `configuration.evictEvery` rows of each head go, so that the
    /// next ones find room. Several tokens are appended to what is there, and what is then beyond
    /// the budget goes with the next update, or with ``flush()``.
    ///
    /// - Parameters:
    ///   - keys: [B, H, L, D] with RoPE applied, L at least 1
    ///   - values: [B, H, L, Dv]
    /// - Returns: keys [B, H, N, D] and values [B, H, N, Dv]; the new rows are the last, in order,
    ///   so that bottom-right causal masks fit
    /// - Throws: `H2OError` where the rows do not fit each other or the stored ones, or the policy
    ///   needs scores, or merges, and the last update got none or no attention of ours
    public func append(keys: MLXArray, values: MLXArray) throws -> (MLXArray, MLXArray) {
        try appendRows(keys, values)
        guard let table else { return (.mlxNone, .mlxNone) }
        let (keys, values) = table.dense()
        return (tied(keys), values)
    }

    /// The same without handing out the rows.
    func appendRows(_ keys: MLXArray, _ values: MLXArray) throws {
        try checkRows(keys: keys, values: values, against: table)
        try checkScored()
        try flush()
        var table =
            try self.table ?? RowTable(emptyFor: keys, values, configuration, owner: described)
        let added = keys.dim(2)
        let gone = added == 1 ? try makeRoom(in: &table) : 0
        try table.append(
            keys, values, offset: offset, limit: configuration.maxKVSize,
            unscored: policy.merges ? 0 : .nan)
        self.table = table
        offset += added
        evicted += gone
        isUnscored = policy.needsScores || policy.merges
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
        var table = try checkScores(scores, lse, against: table)
        table.importance = try policy.importance(
            of: table, scores: scores, lse: lse, isMasked: isMasked)
        self.table = table
        isUnscored = isUnscored && !policy.needsScores
    }

    /// Say that attention has read the last update and added ``rowBias``, where that is not nil: for
    /// attention that is not this module's. A policy that merges waits for it.
    public func attended() { isUnscored = isUnscored && policy.needsScores }

    /// float32 [B, H, N]: what attention has to add to the logits of rows that merged; nil where
    /// none did.
    public var rowBias: MLXArray? {
        policy.merges ? table.flatMap { $0.isMerged ? $0.importance : nil } : nil
    }

    /// float32 [B, H, N]: what the policy accumulated for each row, NaN before its first score. Of
    /// rows that merge `ln n` of the n rows in each.
    public var scores: MLXArray? { table?.importance }

    /// int32 [B, H, N]: the place of each stored row in the sequence.
    public var positions: MLXArray? { table?.positions }

    /// The stored keys [B, H, N, D]; quantised ones dequantised.
    public var keys: MLXArray? { table?.dense().keys }

    /// The stored values [B, H, N, Dv]; quantised ones dequantised.
    public var values: MLXArray? { table?.dense().values }

    /// Rows stored per head, the surplus of a chunk included.
    public var size: Int { table?.length ?? 0 }

    /// Bytes stored, room for further rows included: keys, values, scores and positions.
    public var nbytes: Int { table?.nbytes ?? 0 }

    // MARK: Eviction

    /// Let the surplus of the last chunk go, if there is any: what is beyond the budget.
    ///
    /// The next update, a copy, and ``save(_:to:metadata:)`` do so themselves.
    ///
    /// - Throws: `H2OError` where rows must go and the policy needs scores that have not come yet
    public func flush() throws {
        guard hasSurplus, var table else { return }
        try checkScored()
        let gone = table.length - configuration.maxKVSize
        if policy.merges {
            try merge(to: configuration.maxKVSize, in: &table, recentBefore: offset)
            table.fit()
        } else {
            table.keep(try kept(configuration.maxKVSize, of: table, recentBefore: offset))
        }
        self.table = table
        evicted += gone
    }

    func flushOrReport() {
        do { try flush() } catch { H2OError.report(error) }
    }

    /// Rows of a chunk beyond the budget, to go at the next occasion.
    var hasSurplus: Bool { size > configuration.maxKVSize }

    /// Let a group of rows go where there is no room for one more: no more than are not protected
    /// then. Returns how many of each head went.
    private func makeRoom(in table: inout RowTable) throws -> Int {
        guard table.length == configuration.maxKVSize else { return 0 }
        let protected = configuration.sinkSize + max(0, configuration.recentSize - 1)
        let free = table.length - protected
        // Of a group that merges one row stays that the others go into.
        let most = policy.merges ? max(1, min(free, configuration.heavySize)) : free
        let gone = min(configuration.evictEvery, most)
        if policy.merges, gone < table.length {
            try merge(to: table.length - gone, in: &table, recentBefore: offset + 1)
        } else if gone == table.length {
            table.truncate(to: 0)
        } else {
            let slots = try kept(table.length - gone, of: table, recentBefore: offset + 1)
            table.fillHoles(keeping: slots)
        }
        return gone
    }

    /// Merge all but `count` rows of each head into others; few at a time, so that a row of many is
    /// compared with others as what it has become. Protected is what ``kept(_:of:recentBefore:)``
    /// protects.
    private func merge(
        to count: Int, in table: inout RowTable, recentBefore end: Int
    ) throws {
        let recentStart = end - configuration.recentSize
        while table.length > count {
            let free =
                table.length - configuration.sinkSize - max(0, offset - recentStart)
            let left = max(count, table.length - max(1, free / 4))
            try table.merge(to: left, configuration, recentStart: recentStart)
        }
    }

    /// Slots of the best `count` rows of each head, ascending. The sinks are protected, and the
    /// recent window that ends before the position `end`.
    private func kept(
        _ count: Int, of table: RowTable, recentBefore end: Int
    ) throws -> MLXArray {
        let (keys, values) = table.dense()
        let ranks = try policy.rank(
            PolicyRows(
                keys: keys, values: values, importance: table.importance,
                positions: table.positions, offset: offset))
        return try keepIndices(
            configuration.sharedHeads ? sharedByHeads(ranks) : ranks, positions: table.positions,
            keep: count, sinkSize: configuration.sinkSize,
            recentStart: end - configuration.recentSize)
    }

    private func checkScored() throws {
        guard isUnscored else { return }
        let (what, them) =
            policy.needsScores ? ("scores", "them") : ("attention of MLXH2OLM's", "it")
        throw H2OError(
            "H2OKVCache",
            "\(described) got no \(what) for its last update, and the policy "
                + "'\(configuration.policy.rawValue)' needs \(them): call "
                + "MLXH2OLM.attentionWithCacheUpdate in the model, or choose a policy that needs none."
        )
    }

    var described: String { name.isEmpty ? "this cache" : "the cache of \(name)" }
}

/// The mean of the ranks [B, H, N] of all heads in the place of each head's own. The heads hold the
/// same rows in the same slots, and NaN in one of them is NaN in the mean.
private func sharedByHeads(_ ranks: MLXArray) -> MLXArray {
    broadcast(ranks.mean(axis: 1, keepDims: true), to: ranks.shape)
}
