import CMLXH2O
import Cmlx
import MLX

/// What rows are ranked by when one of them must go.
public enum RowRanks {
    /// The importance.
    case importance
    /// The oldest row goes.
    case age
    /// ``keyDiversity(_:stream:)``.
    case keyDiversity
    /// float32 [B, H, N].
    case array(MLXArray)

    var name: String {
        switch self {
        case .importance: "importance"
        case .age: "age"
        case .keyDiversity: "key_diversity"
        case .array: "array"
        }
    }

    var array: MLXArray? {
        if case .array(let array) = self { array } else { nil }
    }
}

/// What ``replaceWorst(keys:values:importance:positions:newKeys:newValues:position:sinkSize:recentStart:ranks:bits:groupSize:valueBits:stream:)``
/// returns. Evaluating the keys evaluates everything.
public struct ReplacedRows<Rows: CacheRows> {
    public let keys: Rows
    public let values: Rows
    public let importance: MLXArray
    public let positions: MLXArray
}

/// Minus the cosine of each key with the mean of the normalised keys of its head.
///
/// - Parameter keys: [B, H, N, D], float32, float16 or bfloat16
/// - Returns: float32 [B, H, N]; a key of zeros gets 0
/// - Throws: ``H2OError`` where the keys are not as above
public func keyDiversity(_ keys: MLXArray, stream: StreamOrDevice = .default) throws -> MLXArray {
    try results(1) { place in mlx_h2o_key_diversity(place, keys.ctx, stream.ctx) }[0]
}

/// Steady-state eviction: in each head a new row takes the place of the worst one.
///
/// The row is the one that ``evictIndices(_:positions:count:sinkSize:recentStart:stream:)`` names.
/// Its key and value become the new ones, its importance NaN, its position `position`. The arrays
/// that were passed never change; where nothing else holds them a back end may use their memory, so
/// that a row costs no copy of the others.
///
/// - Parameters:
///   - keys: [B, H, N, D], dense or packed; codes are refused
///   - values: [B, H, N, Dv], as the keys
///   - importance: float32 [B, H, N]
///   - positions: int32 [B, H, N], distinct within a head; negative: padding
///   - newKeys: [B, H, 1, D], the dtype of the keys, or of the scales of packed ones, into which
///     they are quantised
///   - newValues: [B, H, 1, Dv]
///   - position: of the new row, 0 to 2^30 - 1, an `Int`, or int32 [B]: one for each sequence
///   - sinkSize: the first positions, which are protected
///   - recentStart: the first position of the protected recent window, as `position`; nil: no
///     window
///   - ranks: what the rows are ranked by
///   - bits: of packed rows, as `groupSize` and `valueBits`
///   - stream: stream or device to evaluate on
/// - Throws: ``H2OError`` where an argument is not as above
public func replaceWorst<Rows: CacheRows>(
    keys: Rows, values: Rows, importance: MLXArray, positions: MLXArray, newKeys: MLXArray,
    newValues: MLXArray, position: any PerSequence, sinkSize: Int = 0,
    recentStart: (any PerSequence)? = nil, ranks: RowRanks = .importance, bits: Int = 8,
    groupSize: Int = 64, valueBits: Int? = nil, stream: StreamOrDevice = .default
) throws -> ReplacedRows<Rows> {
    if let position = position as? Int, !(0..<1 << 30).contains(position) {
        throw H2OError("replace_worst", "position is \(position), expected 0 to 2**30 - 1.")
    }
    let (place, start) = (position.perSequence, recentStart?.perSequence ?? .mlxNone)
    let (found, newK, newV) = try withVector(keys.parts) { keys in
        try withVector(values.parts) { values in
            try vectorResults { newKeyRows, newValueRows in
                try results(2) { marks in
                    mlx_h2o_replace_worst(
                        newKeyRows, newValueRows, marks, marks + 1, keys, values, importance.ctx,
                        positions.ctx, newKeys.ctx, newValues.ctx, place.ctx,
                        Int32(clamping: sinkSize), start.ctx, ranks.name,
                        (ranks.array ?? .mlxNone).ctx, Int32(clamping: bits),
                        Int32(clamping: groupSize), optional(valueBits), stream.ctx)
                }
            }
        }
    }
    return ReplacedRows(
        keys: .rows(of: newK), values: .rows(of: newV), importance: found[0], positions: found[1])
}

/// Quantise new rows of keys and values straight into their slots.
///
/// ``PackedRows`` equal those of `MLX.quantized` on the same device bit for bit. Of ``CodedRows`` a
/// code may be the next one where an element lies at the mean of two levels as closely as float32
/// tells. Keys and values may be of different kinds; dense ones are written as they come. Evaluating
/// the first array of the keys evaluates all. The arrays that were passed never change.
///
/// - Parameters:
///   - keys: of rows [B, H, N, D]
///   - values: of rows [B, H, N, Dv]
///   - newKeys: [B, H, L, D], float32, float16 or bfloat16: the dtype of the scales, or of dense keys
///   - newValues: [B, H, L, Dv], the same of the values
///   - slots: uint32 [B, H, L], the rows to write, distinct within a head; one beyond the last row
///     means the last row
///   - bits: of the keys: 2, 3, 4, 5, 6 or 8; of codes 2, 3 or 4
///   - groupSize: 32, 64 or 128; D and Dv of packed rows are multiples of it
///   - valueBits: of the values; nil: `bits`
///   - stream: stream or device to evaluate on
/// - Throws: ``H2OError`` where an argument is not as above
public func quantizeAppend<Keys: CacheRows, Values: CacheRows>(
    keys: Keys, values: Values, newKeys: MLXArray, newValues: MLXArray, slots: MLXArray,
    bits: Int = 8, groupSize: Int = 64, valueBits: Int? = nil, stream: StreamOrDevice = .default
) throws -> (keys: Keys, values: Values) {
    let (_, newK, newV) = try withVector(keys.parts) { keys in
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
