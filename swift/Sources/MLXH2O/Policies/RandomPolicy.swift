import MLX

/// A sample of all rows seen: the control of every comparison.
///
/// A row's rank is a hash of its position, its KV head and the seed, the same in every language. So
/// the rows that no window protects are at any time a uniform sample of all that came by, the same
/// in every run.
public struct RandomPolicy: EvictionPolicy {
    /// Another seed is another sample; its lower 32 bits count.
    public let seed: Int

    public init(seed: Int = 0) {
        self.seed = seed
    }

    public func rank(_ rows: PolicyRows) throws -> MLXArray {
        let salt = MLXArray([UInt32(truncatingIfNeeded: seed)], [1])
        let heads = MLXArray(Int32(0)..<Int32(rows.positions.dim(1))).asType(.uint32)
        let ofHead = Self.mixed(Self.mixed(salt) ^ heads).expandedDimensions(axis: 1)
        let bits = Self.mixed(ofHead ^ rows.positions.asType(.uint32))
        // The upper 24 bits, which float32 holds exactly.
        return (bits >> UInt32(8)).asType(.float32) / Float(1 << 24)
    }

    /// The finaliser of MurmurHash3: every bit of the input changes half of the output.
    private static func mixed(_ bits: MLXArray) -> MLXArray {
        var bits = bits + UInt32(0x9E37_79B9)
        for (shift, factor) in [(UInt32(16), UInt32(0x85EB_CA6B)), (13, 0xC2B2_AE35)] {
            bits = (bits ^ (bits >> shift)) * factor
        }
        return bits ^ (bits >> UInt32(16))
    }
}
