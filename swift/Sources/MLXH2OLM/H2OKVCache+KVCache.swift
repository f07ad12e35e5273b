import Foundation
import MLX
import MLXH2O
import MLXLMCommon

extension H2OKVCache: H2OScoreTracking {
    public var needsScores: Bool { policy.needsScores }

    public func updateScores(_ scores: MLXArray, isMasked: Bool) {
        do {
            try accumulate(scores, isMasked: isMasked)
        } catch {
            H2OError.report(error)
        }
    }

    public var trackedState: [MLXArray] { table?.remembered ?? [] }
}

extension H2OKVCache: KVCache {
    /// The budget.
    public var maxSize: Int? { configuration.maxKVSize }

    public func innerState() -> [MLXArray] { table?.arrays ?? [] }

    /// As ``append(keys:values:)``; reports what that throws, and then returns the arguments.
    public func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        do {
            return try append(keys: keys, values: values)
        } catch {
            H2OError.report(error)
            return (keys, values)
        }
    }

    /// None for one token; causal, bottom-right aligned, or as a bool array [n, rows + n], for
    /// more.
    ///
    /// Slots do not tell how old a row is: a layer with a sliding window cannot be served, and a
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
        if n == 1 { return .none }
        guard returnArray else { return .causal }
        let before = min(size, configuration.maxKVSize)
        return .array(createCausalMask(n: n, offset: before))
    }

    /// Whether ``trim(_:)`` is exact: until the first eviction, done or due, and not after.
    public var isTrimmable: Bool { evicted == 0 && !hasSurplus }

    public func isTrimmable(after positions: Int) -> Bool {
        isTrimmable && offset + positions <= configuration.maxKVSize
    }

    /// Take back the last `n` tokens, or all where there are fewer; returns how many.
    ///
    /// The rows are exact; the scores that the taken back queries gave to the others remain. After
    /// an eviction the earlier rows cannot be restored: that is reported as an error, and nothing
    /// changes.
    @discardableResult
    public func trim(_ n: Int) -> Int {
        guard isTrimmable else {
            H2OError.report(
                H2OError(
                    "H2OKVCache.trim",
                    "\(described) has evicted rows: expected a cache that has not, see isTrimmable."
                ))
            return 0
        }
        let count = max(0, min(offset, n))
        let left = size - count
        table?.truncate(to: left)
        offset -= count
        return count
    }

    public func copy() -> any KVCache {
        flushOrReport()
        let copy = empty()
        copy.table = table  // updates put new arrays in the place of these and never change them
        copy.offset = offset
        copy.evicted = evicted
        copy.isUnscored = isUnscored
        return copy
    }

    // MARK: State

    /// Keys, values, scores and positions, quantised keys and values as words, scales and biases
    /// each; nothing while there are no rows. What was read stays unchanged by later updates.
    /// Setting it does not change the counts of ``metaState``.
    public var state: [MLXArray] {
        get {
            guard let table else { return [] }
            let (keys, values) = table.fetch()
            return keys + values + table.remembered
        }
        set {
            do {
                table = try RowTable(state: newValue, configuration)
            } catch {
                H2OError.report(error)
            }
        }
    }

    /// Offset, evicted rows, whether scores are missing, name, and the settings as JSON.
    public var metaState: [String] {
        get {
            let settings = (try? JSONEncoder().encode(configuration)) ?? Data()
            return [
                String(offset), String(evicted), String(isUnscored), name,
                String(decoding: settings, as: UTF8.self),
            ]
        }
        set {
            do {
                try restore(metaState: newValue)
            } catch {
                H2OError.report(error)
            }
        }
    }

    func restore(metaState: [String]) throws {
        guard metaState.count == 5, let offset = Int(metaState[0]), let evicted = Int(metaState[1]),
            let isUnscored = Bool(metaState[2]), offset >= 0, evicted >= 0
        else {
            throw H2OError(
                "H2OKVCache.metaState",
                "found \(metaState), expected offset, evicted, unscored, name and settings.")
        }
        let settings: H2OConfiguration
        do {
            settings = try JSONDecoder().decode(
                H2OConfiguration.self, from: Data(metaState[4].utf8))
        } catch {
            throw H2OError("H2OKVCache.metaState", "the settings cannot be read: \(error)")
        }
        self.offset = offset
        self.evicted = evicted
        self.isUnscored = isUnscored
        name = metaState[3]
        configuration = settings
        policy = settings.makePolicy()
    }
}
