import MLX
import MLXH2O

/// An ``H2OKVCache`` that quantises rows once, when they are appended, straight into their slots. With
/// `denseSize`, older rows are quantised in groups, and the newest not yet.
///
/// Rows are evicted, moved, saved and copied as they are packed, and quantised again only if other
/// rows are folded into them. `attentionWithCacheUpdate` of this module passes up to 8 queries to
/// the fused operation over packed rows; longer chunks read their own rows unquantised. Not a
/// `QuantizedKVCacheProtocol`, whose attention returns no scores: its `update` returns arrays.
public final class QuantizedH2OKVCache: H2OKVCache {
    /// - Parameters:
    ///   - configuration: with `kvBits`; if that is nil, 8 bits
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

    /// Elements that share a scale and a bias, as stored; before the first row, as set.
    public var groupSize: Int {
        table?.segments[0].packing?.groupSize ?? configuration.format.kvGroupSize
    }

    /// The stored keys that are quantised, in their frame if they have one.
    public var packedKeys: PackedRows? { table.map { .rows(of: $0.packed.keys.parts) } }

    /// The stored values, like the keys.
    public var packedValues: PackedRows? { table.map { .rows(of: $0.packed.values.parts) } }
}

/// An empty cache of the class that suits the settings.
///
/// - Parameters:
///   - configuration: the settings
///   - policy: your own policy, instead of the one that the settings name
///   - name: what error messages call the cache
public func evictingCache(
    _ configuration: H2OConfiguration, policy: (any EvictionPolicy)? = nil, name: String = ""
) -> H2OKVCache {
    configuration.format.kvBits == nil
        ? H2OKVCache(configuration, policy: policy, name: name)
        : QuantizedH2OKVCache(configuration, policy: policy, name: name)
}
