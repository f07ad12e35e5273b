import MLX
import MLXH2O
import MLXLMCommon

/// Keys and values of one layer, dense or quantised, at most `configuration.maxKVSize` rows per head.
///
/// `offset` counts the tokens seen and drives RoPE; ``size`` counts the rows stored (AtomGradient
/// 2026, section 3.3). In the format `.affine` the rows are quantised: see
/// ``QuantizedH2OKVCache``; in `.codes` they are kept as codes. Each (sequence, KV
/// head) chooses its rows by itself. Below the budget the rows are in order; after evictions their
/// order in memory means nothing, except that the rows of the last update are the last ones, in order.
///
/// A step is: evict on the scores so far, append, attend, take in the scores. Nothing is evaluated
/// here, ever, and properties change nothing. Members of the protocol `KVCache` cannot throw: they
/// report to MLX's error handler, so that `withError` throws; ``append(keys:values:)``,
/// ``accumulate(_:lse:isMasked:)`` and ``flush()`` throw themselves.
public class H2OKVCache {
    /// The settings, with values for all sizes.
    public let configuration: H2OConfiguration
    /// What error messages call this cache, such as "qwen3 layer 3".
    public let name: String
    /// Tokens seen: the position of the next one.
    public internal(set) var offset = 0
    /// Rows evicted per head so far.
    public var evicted: Int { offset - size }

    let policy: any EvictionPolicy
    /// The policy, where it is not the one that the settings name.
    let ownPolicy: (any EvictionPolicy)?
    var table: RowTable?
    /// The last update still waits for its scores, or for attention that counts folded rows.
    var isUnscored = false

    typealias Contents = (table: RowTable?, offset: Int, isUnscored: Bool)

    /// All that changes. Updates put new arrays in the place of these, and never change them.
    var contents: Contents {
        get { (table, offset, isUnscored) }
        set { (table, offset, isUnscored) = newValue }
    }

    /// - Parameters:
    ///   - configuration: the settings
    ///   - policy: a policy of your own, in the place of the one that the settings name; such a cache
    ///     cannot be saved
    ///   - name: what error messages call this cache
    public init(
        _ configuration: H2OConfiguration, policy: (any EvictionPolicy)? = nil, name: String = ""
    ) {
        self.configuration = configuration
        self.name = name
        ownPolicy = policy
        self.policy = policy ?? configuration.makePolicy()
    }

    /// As ``init(_:policy:name:)``, with the default settings of `H2OConfiguration`.
    ///
    /// - Throws: `H2OError` where the settings do not fit
    public convenience init(maxKVSize: Int = 256, name: String = "") throws {
        self.init(try H2OConfiguration(.init(maxKVSize)), name: name)
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
    ///   so that bottom-right causal masks fit, and as they came: what is packed is for later updates
    /// - Throws: `H2OError` where the rows do not fit each other or the stored ones, or the policy
    ///   needs scores, or folds, and the last update got none or no attention of ours
    public func append(keys: MLXArray, values: MLXArray) throws -> (
        keys: MLXArray, values: MLXArray
    ) {
        try appendRows(keys, values)
        let rows = try table?.dense(newest: (keys, values)) ?? (.mlxNone, .mlxNone)
        return (tied(rows.keys), rows.values)
    }

    /// The same without handing out the rows.
    func appendRows(_ keys: MLXArray, _ values: MLXArray) throws {
        try checkRows(keys: keys, values: values, against: table)
        try checkScored()
        let added = keys.dim(2)
        let (end, overflows) = offset.addingReportingOverflow(added)
        guard !overflows, end <= Int(Int32.max) else {
            throw H2OError(
                "H2OKVCache.update",
                "\(described) has seen \(offset) tokens, expected at most 2^31 - 1 with these "
                    + "\(added).")
        }
        var table =
            try self.table
            ?? RowTable(
                emptyFor: keys, values, configuration.format, owner: described)
        try makeRoom(for: added, in: &table)
        try table.append(keys, values, offset: offset, limit: budget(at: end).rows)
        self.table = table
        offset = end
        isUnscored = policy.needsScores || policy.folds
    }

    /// The array, such that evaluating it evaluates what is remembered of the rows: otherwise the
    /// graph of every change would hang on the one before.
    func tied(_ array: MLXArray) -> MLXArray {
        guard let table, table.isChanged || !table.waiting.isEmpty else { return array }
        self.table?.isChanged = false
        return depends(input: array, dependencies: table.remembered)
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
        try takeIn(scores, lse: lse, isMasked: isMasked, &table)
        self.table = table
        isUnscored = isUnscored && !policy.needsScores
    }

    /// Say that attention has read the last update and added ``rowBias``, where that is not nil: for
    /// attention that is not this module's. A policy that folds waits for it.
    public func attended() { isUnscored = isUnscored && policy.needsScores }

    /// float32 [B, H, N]: what attention has to add to the logits of rows that others were folded
    /// into; nil while there are none.
    public var rowBias: MLXArray? { table?.bias }

    /// float32 [B, H, N]: what the policy accumulated for each row, NaN before its first score.
    public var scores: MLXArray? { table?.importance }

    /// int32 [B, H, N]: the place of each stored row in the sequence.
    public var positions: MLXArray? { table?.positions }

    /// The stored keys [B, H, N, D]; quantised ones dequantised.
    public var keys: MLXArray? { dense?.keys }

    /// The stored values [B, H, N, Dv]; quantised ones dequantised.
    public var values: MLXArray? { dense?.values }

    private var dense: (keys: MLXArray, values: MLXArray)? {
        reported(else: nil) { try table?.dense() }
    }

    /// Rows stored per head, the surplus of a chunk included.
    public var size: Int { table?.length ?? 0 }

    /// Bytes stored, room for further rows included: keys, values, scores and positions. Scores that
    /// the policy does not need are not stored, nor positions of rows that came one after the other.
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
        try makeRoom(for: 0, in: &table)
        self.table = table
    }

    /// Rows of a chunk beyond the budget, to go at the next occasion.
    var hasSurplus: Bool { size > budget(at: offset).rows }

    /// The rows of each head while so many tokens have been seen, and how many of the newest are
    /// protected.
    func budget(at tokens: Int) -> (rows: Int, recent: Int) {
        let shorter = configuration.budget.rowsAt?.first { $0[0] >= tokens }
        let rows = shorter?[1] ?? configuration.maxKVSize
        return (rows, max(configuration.recentSize * rows / configuration.maxKVSize, reach))
    }

    /// Let go what must go before so many tokens come: the surplus of a chunk, and, of tokens that
    /// come one by one or may be taken back, what they need room for.
    private func makeRoom(for added: Int, in table: inout RowTable) throws {
        let (rows, recent) = budget(at: offset + added)
        if table.length > rows {
            try settle(before: offset - reach, in: &table)
            try evict(to: rows, recent: recent, before: 0, in: &table)
        }
        try settle(before: offset + added - reach, in: &table)
        let stay = rowsLeft(of: table.length, for: added)
        if stay < table.length {
            try evict(to: stay, recent: recent, before: added, in: &table)
        }
        if added <= max(1, reach) { table.fit(rows) }
    }

    /// Of so many rows, how many stay when so many tokens come.
    func rowsLeft(of rows: Int, for added: Int) -> Int {
        let (most, recent) = budget(at: offset + added)
        let rows = min(rows, most)
        let need = rows + min(added, most) - most
        guard need > 0, (1...max(1, reach)).contains(added) else { return rows }
        // Of those that nothing protects, a whole group.
        let free = rows - configuration.sinkSize - max(0, recent - added)
        return rows - max(need, min(configuration.evictEvery, configuration.heavySize + 1, free))
    }

    /// Let all but `count` rows of each head go, before so many tokens come. The sinks are protected,
    /// and the recent window; the newest rows that may be taken back are not even ranked.
    private func evict(
        to count: Int, recent: Int, before added: Int, in table: inout RowTable
    ) throws {
        let tail = min(table.length, max(0, reach - added))
        table.certain = max(table.certain, offset + added - reach)
        let recentStart = offset + added - recent
        // Rows before it go first, while there can be any.
        let contextStart = configuration.contextSize.flatMap { size in
            let start = offset + added - size
            return size > 0 && start > configuration.sinkSize ? start : nil
        }
        guard count > 0 else { return table.truncate(to: 0) }
        let slots = try kept(
            count - tail, of: &table, tail: tail, recentStart: recentStart,
            contextStart: contextStart)
        table.fillHoles(keeping: slots, tail: tail)
    }

    /// Slots of the best `count` rows of each head but the last `tail`, ascending; the others are
    /// folded into them, where the policy does that.
    private func kept(
        _ count: Int, of table: inout RowTable, tail: Int, recentStart: Int, contextStart: Int?
    ) throws -> MLXArray {
        let length = table.length
        func first(_ rows: MLXArray) -> MLXArray {
            tail == 0 ? rows : rows.rows(upTo: length - tail)
        }
        let positions = first(table.positions)
        guard count > 0 else {
            return MLXArray.zeros(positions.shape.dropLast() + [0], dtype: .uint32)
        }
        let (keys, values) = try table.dense()
        let rows = PolicyRows(
            keys: first(keys), values: first(values), importance: first(table.importance),
            positions: positions, offset: offset, keep: count,
            places: max(
                0, count - configuration.sinkSize - max(0, offset - recentStart - tail)),
            sinkSize: configuration.sinkSize, recentStart: recentStart)
        let known = within(contextStart, try policy.rank(rows), positions: positions)
        let slots = try keepIndices(
            known, positions: positions, keep: count, sinkSize: configuration.sinkSize,
            recentStart: recentStart)
        if policy.folds, count < positions.dim(2) {
            try table.fold(rows, policy, by: known, keeping: slots)
        }
        return slots
    }

    private func checkScored() throws {
        guard isUnscored else { return }
        let (what, them) =
            policy.needsScores ? ("scores", "them") : ("attention of MLXH2OLM's", "it")
        throw H2OError(
            "H2OKVCache",
            "\(described) got no \(what) for its last update, and the policy "
                + "'\(policyName)' needs \(them): call "
                + "MLXH2OLM.attentionWithCacheUpdate in the model, or choose a policy that needs none."
        )
    }

    var policyName: String {
        ownPolicy.map { "\(type(of: $0))" } ?? configuration.policy.name.rawValue
    }

    var described: String { name.isEmpty ? "this cache" : "the cache of \(name)" }
}

/// The array [B, H, N], with NaN for rows before `start`, of these positions.
func within(_ start: Int?, _ array: MLXArray, positions: MLXArray) -> MLXArray {
    guard let start else { return array }
    return which(positions .< MLXArray(Int32(start)), MLXArray(Float.nan), array)
}

/// What `body` makes of these caches; where it throws, they are as they were before.
func allOrNothing<R>(_ caches: [H2OKVCache], _ body: () throws -> R) rethrows -> R {
    let before = caches.map(\.contents)
    do { return try body() } catch {
        for (cache, contents) in zip(caches, before) { cache.contents = contents }
        throw error
    }
}

/// For members of protocols, which cannot throw: what `body` throws is reported.
func reported<R>(else other: R, _ body: () throws -> R) -> R {
    do { return try body() } catch {
        H2OError.report(error)
        return other
    }
}
