import CMLXH2O
import Cmlx
import MLX

/// Quantise new rows of keys and values straight into their slots.
///
/// ``PackedRows`` equal those of `MLX.quantized` on the same device bit for bit. In ``CodedRows`` a
/// code may differ by one for an element within float32 rounding of the mean of two levels. Keys
/// and values may have different formats; dense rows are written unchanged. Evaluating the first
/// array of the keys evaluates all. Input arrays never change.
///
/// - Parameters:
///   - keys: of rows [B, H, N, D]
///   - values: of rows [B, H, N, Dv]
///   - newKeys: [B, H, L, D], float32, float16 or bfloat16: the dtype of scales, or of dense keys
///   - newValues: [B, H, L, Dv], the same for the values
///   - slots: uint32 [B, H, L], the rows to write, distinct within a head; a slot beyond the last
///     row means the last row
///   - bits: of the keys: 2, 3, 4, 5, 6 or 8; of codes 2, 3 or 4
///   - groupSize: 32, 64 or 128; D and Dv of packed rows are multiples of it
///   - valueBits: of the values; nil: `bits`
///   - stream: stream or device to evaluate on
/// - Throws: ``H2OError`` if an argument is not as above
public func quantizeAppend<Keys: CacheRows, Values: CacheRows>(
    keys: Keys, values: Values, newKeys: MLXArray, newValues: MLXArray, slots: MLXArray,
    bits: Int = 8, groupSize: Int = 64, valueBits: Int? = nil, stream: StreamOrDevice = .default
) throws -> (keys: Keys, values: Values) {
    let (newK, newV) = try withVector(keys.parts) { keys in
        try withVector(values.parts) { values in
            try vectorResults { newKeyRows, newValueRows in
                try H2OError.catching {
                    H2OBackend.applyCurrent()
                    _ = mlx_h2o_quantize_append(
                        newKeyRows, newValueRows, keys, values, newKeys.ctx, newValues.ctx,
                        slots.ctx, Int32(clamping: bits), Int32(clamping: groupSize),
                        optional(valueBits), stream.ctx)
                }
            }
        }
    }
    return (.rows(of: newK), .rows(of: newV))
}
