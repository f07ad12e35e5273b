import Cmlx

/// Fused operations.
public enum MLXFast {
    /// Which (query, key) pairs take part.
    public enum ScaledDotProductAttentionMaskMode {
        case none
        /// Bool, true where a query sees a key, or floats that are added to the logits.
        case array(MLXArray)
        /// Bottom-right aligned.
        case causal

        public var mask: MLXArray? {
            if case .array(let array) = self { array } else { nil }
        }

        public var mode: String {
            if case .causal = self { "causal" } else { "" }
        }
    }

    /// Attention of `queries` [B, Hq, Lq, D] over `keys` [B, Hkv, N, D] and `values`
    /// [B, Hkv, N, Dv], where Hq is a multiple of Hkv.
    public static func scaledDotProductAttention(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: ScaledDotProductAttentionMaskMode, sinks: MLXArray? = nil,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        var result = mlx_array_new()
        mlx_fast_scaled_dot_product_attention(
            &result, queries.ctx, keys.ctx, values.ctx, scale, mask.mode,
            (mask.mask ?? .mlxNone).ctx, (sinks ?? .mlxNone).ctx, stream.ctx)
        return MLXArray(result)
    }
    /// Rotary embedding of the first `dimensions` elements of the last axis; the rows of the axis
    /// before it are at positions `offset` and up. The original's name begins with a capital.
    package static func rope(
        _ array: MLXArray, dimensions: Int, traditional: Bool, base: Float?, scale: Float,
        offset: Int, freqs: MLXArray? = nil, stream: StreamOrDevice = .default
    ) -> MLXArray {
        var result = mlx_array_new()
        mlx_fast_rope(
            &result, array.ctx, Int32(dimensions), traditional,
            mlx_optional_float(value: base ?? 0, has_value: base != nil), scale,
            Int32(clamping: offset), (freqs ?? .mlxNone).ctx, stream.ctx)
        return MLXArray(result)
    }

    /// Rows divided by their root mean square, times `weight`.
    public static func rmsNorm(
        _ x: MLXArray, weight: MLXArray, eps: Float, stream: StreamOrDevice = .default
    ) -> MLXArray {
        var result = mlx_array_new()
        mlx_fast_rms_norm(&result, x.ctx, weight.ctx, eps, stream.ctx)
        return MLXArray(result)
    }
}
