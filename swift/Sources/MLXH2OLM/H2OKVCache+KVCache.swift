import MLX
import MLXH2O
import MLXLMCommon

extension H2OKVCache: H2OScoreTracking {
    public var needsScores: Bool { policy.needsScores }

    public func updateScores(_ scores: MLXArray, isMasked: Bool) {
        reported(else: ()) { try accumulate(scores, isMasked: isMasked) }
    }

    public var trackedState: [MLXArray] { table?.remembered ?? [] }
}

extension H2OKVCache: KVCache {
    /// The budget; nil: unbounded.
    public var maxSize: Int? { configuration.maxKVSize }

    public func innerState() -> [MLXArray] { table?.arrays ?? [] }

    /// As ``append(keys:values:)``; reports its errors, and then returns the arguments.
    public func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        reported(else: (keys, values)) { try append(keys: keys, values: values) }
    }

    /// The mask: none for one token; for more, causal, bottom-right aligned, or a bool array [n,
    /// rows + n].
    ///
    /// Slots do not tell the age of a row, so layers with a sliding window cannot be served: a
    /// `windowSize` is reported as an error.
    public func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        if let windowSize {
            H2OError.report(
                H2OError(
                    "H2OKVCache.makeMask",
                    "windowSize is \(windowSize), expected nil: \(described) evicts rows, and cannot "
                        + "serve a sliding-window layer."))
        }
        guard (1...Int(Int32.max) - size).contains(n) else {
            H2OError.report(
                H2OError("H2OKVCache.makeMask", "n is \(n), expected at least 1, and int32 places.")
            )
            return .none
        }
        if n == 1 { return .none }
        guard returnArray else { return .causal }
        return .array(createCausalMask(n: n, offset: rowsLeft(of: size, for: n)))
    }

    /// Whether ``trim(_:)`` is exact at any time: in an unbounded cache, else only with
    /// `configuration.speculative`, for that many tokens and one more, since a caller may check this
    /// only at the start.
    public var isTrimmable: Bool { isTrimmable(after: 1) }

    /// Whether `positions` tokens can be taken back right after they were appended.
    public func isTrimmable(after positions: Int) -> Bool { maxSize == nil || positions <= reach }

    /// Take back the last `n` tokens, or all if there are fewer; returns how many.
    ///
    /// With `configuration.speculative`, that many tokens and one more leave no trace, in one call
    /// or several. Without it, rows are exact until the first eviction, and scores from the removed
    /// queries remain. Trimming more than can be restored is reported as an error, and changes
    /// nothing.
    @discardableResult
    public func trim(_ n: Int) -> Int { reported(else: 0) { try takeBack(n) } }

    func takeBack(_ n: Int) throws -> Int {
        guard n > 0, size > 0 else { return 0 }
        let most = min(reach, offset - (table?.certain ?? 0))
        guard n <= most || (evicted == 0 && !hasSurplus) else {
            throw H2OError(
                "H2OKVCache.trim",
                "\(described) has evicted rows and was asked to take back \(n) tokens, expected at "
                    + "most \(most).")
        }
        let count = min(n, size)
        let left = size - count
        offset -= count
        table?.keepWaiting(Int.min..<offset)
        table?.truncate(to: left)
        if left == 0 { table = nil }  // a state and a file hold rows, or nothing
        isUnscored = false
        return count
    }

    public func copy() -> any KVCache { duplicate() }

    func duplicate() -> H2OKVCache {
        reported(else: ()) { try flush() }
        let copy = evictingCache(configuration, policy: ownPolicy, name: name)
        copy.contents = contents
        return copy
    }

    // MARK: State

    /// Keys, values, scores, biases if rows were folded, and positions. Quantised keys and values
    /// are words, scales and biases each, and with `denseSize` also the newest rows; in a frame,
    /// their centre follows. Empty while there are no rows. Later updates do not change arrays read
    /// here. Setting it puts ``offset`` after the last position.
    public var state: [MLXArray] {
        get { table?.parts.flatMap { $0 } ?? [] }
        set { reported(else: ()) { try hold(newValue) } }
    }

    /// Replace the rows. The old ones also give what a state does not record: the dtype of coded
    /// rows, and if an earlier version wrote it the original size of padded values.
    func hold(_ state: [MLXArray]) throws {
        let own = table?.layouts.values
        table = try RowTable(
            state: state, configuration.format, dtype: own?.dtype, valueSize: own?.size)
        offset = (table?.lastPosition ?? -1) + 1
        table?.findCertain(of: offset)
        isUnscored = false
    }

    /// Empty: ``save(_:to:metadata:)`` saves everything beyond ``state``. So `loadPromptCache` of
    /// mlx-swift-lm refuses files in which its `savePromptCache` wrote these caches as plain ones.
    /// Setting anything else is reported as an error.
    public var metaState: [String] {
        get { [] }
        set {
            guard !newValue.joined().isEmpty else { return }
            H2OError.report(
                H2OError(
                    "H2OKVCache.metaState",
                    "found \(newValue), expected nothing: H2OKVCache.load reads what save wrote."))
        }
    }
}
