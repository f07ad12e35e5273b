import MLX
import MLXH2O
import MLXLMCommon

/// Keys and values of one layer, dense or quantised: at most `configuration.maxKVSize` rows a head.
///
/// `offset` counts the tokens seen and drives RoPE; ``size`` counts the rows stored (AtomGradient
/// 2026, section 3.3). In the format `.affine` rows are quantised: see ``QuantizedH2OKVCache``; in
/// `.codes` they are stored as codes. Each (sequence, KV head) chooses its own rows. Below the
/// budget the rows are in order. After evictions their order in memory means nothing, except that
/// the rows of the last update are at the end, in order.
///
/// A step is: evict by the scores so far, append, attend, accumulate the scores. Nothing here ever
/// evaluates, and reading properties changes nothing. Members of the protocol `KVCache` cannot
/// throw: they report to MLX's error handler, so that `withError` throws. ``append(keys:values:)``,
/// ``accumulate(_:lse:isMasked:)`` and ``flush()`` throw themselves.
public class H2OKVCache {
    /// The settings, with all sizes filled in.
    public let configuration: H2OConfiguration
    /// What error messages call this cache, such as "qwen3 layer 3".
    public let name: String
    /// Tokens seen: the position of the next one.
    public internal(set) var offset = 0
    /// Rows evicted per head so far.
    public var evicted: Int { offset - size }

    let policy: any EvictionPolicy
    /// The app's own policy, if it replaces the one that the settings name.
    let ownPolicy: (any EvictionPolicy)?
    var table: RowTable?
    /// The last update still waits for its scores, or for attention that uses the row bias.
    var isUnscored = false

    typealias Contents = (table: RowTable?, offset: Int, isUnscored: Bool)

    /// All mutable state. Updates replace these arrays, and never change them.
    var contents: Contents {
        get { (table, offset, isUnscored) }
        set { (table, offset, isUnscored) = newValue }
    }

    /// - Parameters:
    ///   - configuration: the settings
    ///   - policy: your own policy, instead of the settings'; such a cache cannot be saved
    ///   - name: what error messages call this cache
    public init(
        _ configuration: H2OConfiguration, policy: (any EvictionPolicy)? = nil, name: String = ""
    ) {
        self.configuration = configuration
        self.name = name
        ownPolicy = policy
        self.policy = policy ?? configuration.makePolicy()
    }

    /// Evict rows if needed, append the new rows and return all rows for attention.
    ///
    /// If the cache is full, one token evicts `configuration.evictEvery` rows of each head, so that
    /// the next tokens find room. Several tokens are appended first; the surplus is evicted by the
    /// next update or ``flush()``.
    ///
    /// - Parameters:
    ///   - keys: [B, H, L, D] with RoPE applied, L at least 1
    ///   - values: [B, H, L, Dv]
    /// - Returns: keys [B, H, N, D] and values [B, H, N, Dv]; the new rows are last, in order, so
    ///   that bottom-right causal masks fit, and unquantised: later updates read them packed
    /// - Throws: `H2OError` if the rows do not fit each other or the stored rows, or if the policy
    ///   needs scores, or folds, and the last update got none, or not our attention
    public func append(keys: MLXArray, values: MLXArray) throws -> (
        keys: MLXArray, values: MLXArray
    ) {
        try appendRows(keys, values)
        let rows = try table?.dense(newest: (keys, values)) ?? (.mlxNone, .mlxNone)
        return (tied(rows.keys), rows.values)
    }

    /// The same without returning the rows.
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
            ?? RowTable(emptyFor: keys, values, configuration.format, owner: described)
        try makeRoom(for: added, in: &table)
        try table.append(
            keys, values, offset: offset, limit: min(unpacked.full, budget(at: end).rows))
        self.table = table
        offset = end
        isUnscored = policy.needsScores || folds
    }

    /// The array, such that evaluating it also evaluates scores, positions and biases: otherwise
    /// each change would keep the graph of all earlier ones.
    func tied(_ array: MLXArray) -> MLXArray {
        guard let table, table.isChanged || !table.waiting.isEmpty else { return array }
        self.table?.isChanged = false
        return depends(input: array, dependencies: table.remembered)
    }

    /// Accumulate the scores of the attention that followed an update. Policies that need no scores
    /// ignore them.
    ///
    /// - Parameters:
    ///   - scores: float32 [B, Hq, L, N], logits before the softmax, -inf where masked, the queries
    ///     in order, N the rows stored. The policy decides how many of the last queries count
    ///   - lse: float32 [B, Hq, L], for policies that need weights, `exp(scores - lse)`; nil: the
    ///     lse of these scores, which is right for attention without sinks
    ///   - isMasked: false promises that no score is -inf, which saves work
    /// - Throws: `H2OError` if there are no rows yet, or an argument has another shape or dtype
    public func accumulate(
        _ scores: MLXArray, lse: MLXArray? = nil, isMasked: Bool = true
    ) throws {
        var table = try checkScores(scores, lse, against: table)
        try takeIn(scores, lse: lse, isMasked: isMasked, &table)
        self.table = table
        isUnscored = isUnscored && !policy.needsScores
    }

    /// For attention other than this module's: tell the cache that it has read the last update and
    /// added ``rowBias``, if that is not nil. A policy that folds waits for this.
    public func attended() { isUnscored = isUnscored && policy.needsScores }

    /// float32 [B, H, N]: attention must add this to the logits, for rows that others were folded
    /// into; nil while there are none.
    public var rowBias: MLXArray? { table?.bias }

    /// float32 [B, H, N]: the accumulated importance, NaN before a row's first score.
    public var scores: MLXArray? { table?.importance }

    /// int32 [B, H, N]: the position of each stored row in the sequence.
    public var positions: MLXArray? { table?.positions }

    /// The stored keys [B, H, N, D], dequantised.
    public var keys: MLXArray? { dense?.keys }

    /// The stored values [B, H, N, Dv], dequantised.
    public var values: MLXArray? { dense?.values }

    private var dense: (keys: MLXArray, values: MLXArray)? {
        reported(else: nil) { try table?.dense() }
    }

    /// Rows stored per head, including the surplus of a chunk.
    public var size: Int { table?.length ?? 0 }

    /// Bytes stored, including room for more rows: keys, values, scores and positions. Scores are
    /// stored only if the policy needs them, positions only if rows are not consecutive.
    public var nbytes: Int { table?.nbytes ?? 0 }

    // MARK: Eviction

    /// Evict the surplus of the last chunk, beyond the budget, and quantise rows that are due.
    ///
    /// The next update, a copy, and ``save(_:to:metadata:)`` do so themselves.
    ///
    /// - Throws: `H2OError` if rows must go and the policy still waits for scores
    public func flush() throws {
        guard var table, hasSurplus || !isUnscored else { return }
        try checkScored()
        try makeRoom(for: 0, in: &table)
        self.table = table
    }

    /// Whether rows of a chunk exceed the budget, until the next eviction.
    var hasSurplus: Bool { size > budget(at: offset).rows }

    /// The rows of each head after `tokens` tokens, and how many of the newest are protected.
    func budget(at tokens: Int) -> (rows: Int, recent: Int) {
        guard let most = maxSize else { return (.max, reach) }
        let rows = configuration.budget.rowsAt?.first(where: { $0[0] >= tokens })?[1] ?? most
        return (rows, max(configuration.recentSize * rows / most, reach))
    }

    /// How many rows fill a tail of unquantised rows, and how many then stay so.
    private var unpacked: (full: Int, left: Int) {
        let left = (configuration.format.denseSize ?? 0) + reach
        return (configuration.format.hasTail ? left + group : .max, left)
    }

    /// Rows that are evicted together, or in an unbounded cache quantised together.
    private var group: Int {
        maxSize == nil ? 32 : min(configuration.evictEvery, configuration.heavySize + 1)
    }

    /// Whether evicted rows are folded into others: not where rows have more than one precision.
    private var folds: Bool { policy.folds && !configuration.format.hasTail }

    /// Evict before `added` tokens come: the surplus of a chunk, and room for tokens that come one
    /// by one or may be taken back. Rows of a full tail are quantised.
    private func makeRoom(for added: Int, in table: inout RowTable) throws {
        let (rows, recent) = budget(at: offset + added)
        let (full, left) = unpacked
        if table.length > rows {
            try settle(before: offset - reach, in: &table)
            try evict(to: rows, recent: recent, before: 0, in: &table)
        } else if table.tail.length > full {
            try table.pack(leaving: left)
        }
        try settle(before: offset + added - reach, in: &table)
        let stay = rowsLeft(of: table.length, for: added)
        if stay < table.length {
            try evict(to: stay, recent: recent, before: added, in: &table)
        }
        if added > 0, table.tail.length >= full { try table.pack(leaving: left) }
        if added <= max(1, reach) { table.fit(min(rows, full)) }
    }

    /// Of `rows` rows, how many stay when `added` tokens come.
    func rowsLeft(of rows: Int, for added: Int) -> Int {
        let (most, recent) = budget(at: offset + added)
        let rows = min(rows, most)
        let need = rows + min(added, most) - most
        guard need > 0, (1...max(1, reach)).contains(added) else { return rows }
        // Evict a whole group, of those that nothing protects.
        let free = rows - configuration.protectedSize - max(0, recent - added)
        return rows - max(need, min(group, free))
    }

    /// Evict all but `count` rows of each head, before `added` tokens come. Sinks and the recent
    /// window are protected; the newest rows, which may be taken back, are not even ranked.
    private func evict(
        to count: Int, recent: Int, before added: Int, in table: inout RowTable
    ) throws {
        let tail = min(table.tail.length, max(0, reach - added))
        table.certain = max(table.certain, offset + added - reach)
        let recentStart = offset + added - recent
        // Rows before this position are evicted first; nil while there can be none.
        let contextStart = configuration.contextSize.flatMap { size in
            let start = offset + added - size
            return size > 0 && start > configuration.protectedSize ? start : nil
        }
        guard count > 0 else { return table.truncate(to: 0) }
        let slots = try kept(
            count - tail, of: &table, tail: tail, recentStart: recentStart,
            contextStart: contextStart)
        // Only rows that are sure to stay remain unquantised.
        let left =
            configuration.format.hasTail
            ? min(count, table.tail.length, max(0, recent - added), unpacked.left) : tail
        try table.pack(leaving: left)
        table.fillHoles(keeping: slots.rows(upTo: count - left), tail: left)
    }

    /// Slots of the best `count` rows of each head except the last `tail`, ascending. If the policy
    /// folds, the others are folded into them.
    private func kept(
        _ count: Int, of table: inout RowTable, tail: Int, recentStart: Int, contextStart: Int?
    ) throws -> MLXArray {
        // Rows of a prefix lie in the first slots.
        let skip = configuration.budget.prefixSize ?? 0
        let end = table.length - tail
        func first(_ rows: MLXArray) -> MLXArray {
            skip == 0 ? rows.rows(upTo: end) : rows[0..., 0..., skip..<end]
        }
        let positions = first(table.positions)
        let prefix = broadcast(
            MLXArray(UInt32(0)..<UInt32(skip)), to: positions.shape.dropLast() + [skip])
        guard count > skip else { return prefix }
        let (keys, values) = try table.dense()
        let rows = PolicyRows(
            keys: first(keys), values: first(values), importance: first(table.importance),
            positions: positions, offset: offset, keep: count - skip,
            places: max(
                0, count - configuration.protectedSize - max(0, offset - recentStart - tail)),
            sinkSize: configuration.protectedSize, recentStart: recentStart)
        let known = within(contextStart, try policy.rank(rows), positions: positions)
        let slots = try keepIndices(
            known, positions: positions, keep: rows.keep, sinkSize: rows.sinkSize,
            recentStart: recentStart)
        if folds, rows.keep < positions.dim(2) {
            try table.fold(rows, policy, by: known, keeping: slots, behind: skip)
        }
        return skip == 0 ? slots : concatenated([prefix, slots + UInt32(skip)], axis: 2)
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

/// The array [B, H, N], with NaN for rows whose position is before `start`.
func within(_ start: Int?, _ array: MLXArray, positions: MLXArray) -> MLXArray {
    guard let start else { return array }
    return which(positions .< MLXArray(Int32(start)), MLXArray(Float.nan), array)
}

/// Runs `body`; if it throws, the caches get their earlier contents back.
func allOrNothing<R>(_ caches: [H2OKVCache], _ body: () throws -> R) rethrows -> R {
    let before = caches.map(\.contents)
    do { return try body() } catch {
        for (cache, contents) in zip(caches, before) { cache.contents = contents }
        throw error
    }
}

/// For protocol members, which cannot throw: reports errors of `body`.
func reported<R>(else other: R, _ body: () throws -> R) -> R {
    do { return try body() } catch {
        H2OError.report(error)
        return other
    }
}
