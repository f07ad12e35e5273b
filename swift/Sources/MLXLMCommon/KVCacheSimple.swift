import MLX

/// A cache that keeps every row.
public class KVCacheSimple: BaseKVCache {
    private var keys: MLXArray?
    private var values: MLXArray?
    /// Rows by which the buffers grow.
    public var step = 256

    public override init() {
        super.init()
    }

    public override func innerState() -> [MLXArray] { [keys, values].compactMap { $0 } }

    public override func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) {
        let start = offset
        offset += keys.dim(2)
        let buffers = (
            appended(keys, to: self.keys, at: start), appended(values, to: self.values, at: start)
        )
        (self.keys, self.values) = buffers
        return (rows(buffers.0), rows(buffers.1))
    }

    private func appended(_ rows: MLXArray, to buffer: MLXArray?, at start: Int) -> MLXArray {
        if let buffer, offset <= buffer.dim(2) {
            buffer[.ellipsis, start..<offset, 0...] = rows
            return buffer
        }
        let room = (step - offset % step) % step
        let shape = [rows.dim(0), rows.dim(1), room, rows.dim(3)]
        let used = buffer.map { [$0[.ellipsis, ..<start, 0...]] } ?? []
        return concatenated(used + [rows, MLXArray.zeros(shape, dtype: rows.dtype)], axis: 2)
    }

    private func rows(_ buffer: MLXArray) -> MLXArray { buffer[.ellipsis, ..<offset, 0...] }

    public override var state: [MLXArray] {
        get { innerState().map(rows) }
        set {
            precondition(newValue.count == 2, "the state of KVCacheSimple is keys and values")
            (keys, values) = (newValue[0], newValue[1])
            offset = newValue[0].dim(2)
        }
    }

    public override var isTrimmable: Bool { true }

    @discardableResult
    public override func trim(_ n: Int) -> Int {
        let count = min(offset, n)
        offset -= count
        return count
    }

    public override func copy() -> any KVCache {
        let copy = KVCacheSimple()
        copy.step = step
        // New array objects, since `update` writes into those that it holds.
        if offset > 0 { copy.state = state.map { $0[.ellipsis] } }
        return copy
    }
}
