/// Rows as codes of rotated directions (TurboQuant; docs/design.md), under Python's names.
///
/// `turbo3` has codes of 3 bits. If keys differ, they come first: `turbo4v3`. In `turbo8v3` keys
/// have 8 bits with scales and biases, in `turbo0v3` they are unquantised.
public enum KVFormat: String, Sendable, Codable, CaseIterable {
    /// Codes of this many bits for keys and values.
    case turbo2, turbo3, turbo4
    /// Unquantised keys, with coded values.
    case turbo0v2, turbo0v3, turbo0v4
    /// Keys of 8 bits with scales and biases, with coded values.
    case turbo8v2, turbo8v3, turbo8v4
    /// Codes with different bits for keys and values.
    case turbo2v3, turbo2v4, turbo3v2, turbo3v4, turbo4v2, turbo4v3

    /// Bits of keys: 0 if unquantised, 8 with scales and biases, else of their codes.
    public var keyBits: Int { bits[0] }
    /// Bits of the codes of the values.
    public var valueBits: Int { bits[bits.count - 1] }

    private var bits: [Int] { rawValue.compactMap(\.wholeNumberValue) }
}
