import CMLXH2O
import Cmlx
import MLX

/// Rows as codes of rotated directions, and norms (docs/design.md).
///
/// - Parameters:
///   - rows: [B, H, N, D], float32, float16 or bfloat16; D is a power of two from 32 to 1,024
///   - bits: 2, 3 or 4
///   - ofValues: whether the rows are values; keys have other signs
///   - stream: stream or device to evaluate on
/// - Throws: ``H2OError`` if an argument is not as above
public func encodeRows(
    _ rows: MLXArray, bits: Int, ofValues: Bool, stream: StreamOrDevice = .default
) throws -> CodedRows {
    .rows(
        of: try results(2) { place in
            mlx_h2o_encode_rows(
                place, place + 1, rows.ctx, Int32(clamping: bits), ofValues, stream.ctx)
        })
}

/// The rows that codes stand for, float32 [B, H, N, D]; arguments and errors as in
/// ``encodeRows(_:bits:ofValues:stream:)``.
public func decodeRows(
    _ rows: CodedRows, bits: Int, ofValues: Bool, stream: StreamOrDevice = .default
) throws -> MLXArray {
    try results(1) { place in
        mlx_h2o_decode_rows(
            place, rows.words.ctx, rows.norms.ctx, Int32(clamping: bits), ofValues, stream.ctx)
    }[0]
}
