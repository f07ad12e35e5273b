import MLX
import MLXH2O

/// An ``H2OKVCache`` whose rows are quantised once, when they come, straight into their slots.
///
/// Rows are evicted, moved, saved and copied as they are packed; none is ever dequantised and
/// quantised again. `attentionWithCacheUpdate` of this module gives up to 8 queries to the fused
/// operation over packed rows; a longer chunk reads its own rows as they came. It is no `QuantizedKVCacheProtocol`, whose attention is not fused and
/// returns no scores: `update(keys:values:)` returns arrays, in which the new rows are as they came.
public final class QuantizedH2OKVCache: H2OKVCache {
    /// - Parameters:
    ///   - configuration: with `kvBits`; where that is nil, 8 bits
    ///   - policy: as in ``H2OKVCache``
    ///   - name: what error messages call this cache
    public override init(
        _ configuration: H2OConfiguration, policy: (any EvictionPolicy)? = nil, name: String = ""
    ) {
        super.init(
            configuration.format.kvBits == nil ? configuration.with8Bits : configuration,
            policy: policy, name: name)
    }

    /// Bits of the keys.
    public var bits: Int { configuration.format.kvBits ?? 8 }

    /// Elements that share a scale and a bias, as stored; before the first row as set.
    public var groupSize: Int { table?.packing?.groupSize ?? configuration.format.kvGroupSize }

    /// As ``H2OKVCache/append(keys:values:)``, but the rows are returned as they are stored.
    public func appendPacked(
        keys: MLXArray, values: MLXArray
    ) throws -> (keys: PackedRows, values: PackedRows) {
        try appendRows(keys, values)
        guard let table else {
            throw H2OError("QuantizedH2OKVCache.appendPacked", "there are no rows.")
        }
        let (keys, values) = table.fetch()
        return (.rows(of: [tied(keys[0])] + keys[1...]), .rows(of: values))
    }

    /// The stored keys.
    public var packedKeys: PackedRows? { table.map { .rows(of: $0.fetch().keys) } }

    /// The stored values.
    public var packedValues: PackedRows? { table.map { .rows(of: $0.fetch().values) } }
}

/// An empty cache of the class that the settings ask for.
///
/// - Parameters:
///   - configuration: the settings
///   - policy: a policy of your own, in the place of the one that the settings name
///   - name: what error messages call the cache
public func evictingCache(
    _ configuration: H2OConfiguration, policy: (any EvictionPolicy)? = nil, name: String = ""
) -> H2OKVCache {
    configuration.format.kvBits == nil
        ? H2OKVCache(configuration, policy: policy, name: name)
        : QuantizedH2OKVCache(configuration, policy: policy, name: name)
}
