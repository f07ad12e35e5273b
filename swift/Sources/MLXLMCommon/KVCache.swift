import MLX

/// Where rotary positions start: one number, or one per sequence.
public enum RoPEOffset {
    case scalar(Int)
    case batch(MLXArray)
}

/// Keys and values of one attention layer, as mlx-swift-lm declares it.
public protocol KVCache: Evaluatable {
    /// Tokens seen: the position of the next one.
    var offset: Int { get }
    var ropeOffset: RoPEOffset { get }
    /// The budget, if there is one.
    var maxSize: Int? { get }

    /// Append new rows and return all of them.
    func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray)

    /// The arrays to save.
    var state: [MLXArray] { get set }
    /// The settings to save beside them.
    var metaState: [String] { get set }

    var isTrimmable: Bool { get }
    /// Whether the cache will still be trimmable after `positions` more tokens.
    func isTrimmable(after positions: Int) -> Bool
    /// Take back the last `n` tokens; returns how many were taken back.
    @discardableResult
    func trim(_ n: Int) -> Int

    /// The mask for the next `n` tokens over the rows that their update will return.
    func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode

    /// A copy that shares no mutable state.
    func copy() -> any KVCache

    func prepare(lengths: [Int]?)
    func prepare(lengths: MLXArray?)
    func finalize()
}

extension KVCache {
    public var ropeOffset: RoPEOffset { .scalar(offset) }
    public func isTrimmable(after positions: Int) -> Bool { isTrimmable }
    public func prepare(lengths: [Int]?) {}
    public func prepare(lengths: MLXArray?) {}
    public func finalize() {}
}

/// The part that caches have in common; subclasses add `update` and `copy`.
open class BaseKVCache: KVCache {
    public var offset = 0
    public var maxSize: Int? { nil }
    open var ropeOffset: RoPEOffset { .scalar(offset) }
    open var isTrimmable: Bool { false }

    public func innerState() -> [MLXArray] { [] }

    open func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        fatalError("update(keys:values:) must be implemented by a subclass")
    }

    open var state: [MLXArray] {
        get { [] }
        set { precondition(newValue.isEmpty, "this cache has no state") }
    }

    open var metaState: [String] {
        get { [""] }
        set { precondition(newValue == [""], "this cache has no metaState") }
    }

    open func isTrimmable(after positions: Int) -> Bool { isTrimmable }

    @discardableResult
    open func trim(_ n: Int) -> Int { 0 }

    open func copy() -> any KVCache {
        fatalError("copy() must be implemented by a subclass")
    }

    open func prepare(lengths: [Int]?) {}
    open func prepare(lengths: MLXArray?) {}
    open func finalize() {}

    open func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode {
        makeAttentionMask(n: n, offset: offset, windowSize: windowSize, returnArray: returnArray)
    }
}

/// bool [n, offset + n]: each of the last `n` positions sees itself and those before it, or only
/// the last `windowSize`.
public func createCausalMask(n: Int, offset: Int, windowSize: Int? = nil) -> MLXArray {
    let columns = MLXArray(Int32(0)..<Int32(offset + n))[.newAxis]
    let rows = MLXArray(Int32(offset)..<Int32(offset + n))[0..., .newAxis]
    let mask = rows .>= columns
    guard let windowSize else { return mask }
    return mask .&& (rows .< columns + windowSize)
}

func makeAttentionMask(
    n: Int, offset: Int, windowSize: Int?, returnArray: Bool
) -> MLXFast.ScaledDotProductAttentionMaskMode {
    if n == 1 { return .none }
    if returnArray || windowSize.map({ n > $0 }) == true {
        return .array(createCausalMask(n: n, offset: offset, windowSize: windowSize))
    }
    return .causal
}

/// The mask for `n` new tokens, from the cache if there is one.
public func makeAttentionMask(
    n: Int, cache: KVCache?, windowSize: Int? = nil, returnArray: Bool = false
) -> MLXFast.ScaledDotProductAttentionMaskMode {
    cache?.makeMask(n: n, windowSize: windowSize, returnArray: returnArray)
        ?? makeAttentionMask(n: n, offset: 0, windowSize: windowSize, returnArray: returnArray)
}
