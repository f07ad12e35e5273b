import MLX
import MLXH2O

// Checks of a cache's inputs. All throw H2OError with what was found and what was expected.

/// New rows [B, H, L, D] and [B, H, L, Dv] that fit each other and the stored rows.
func checkRows(keys: MLXArray, values: MLXArray, against table: RowTable?) throws {
    let operation = "H2OKVCache.update"
    let found = (keys.shape, values.shape)
    guard found.0.count == 4, found.1.count == 4, found.0.prefix(3) == found.1.prefix(3) else {
        throw H2OError(
            operation,
            "keys have shape \(found.0), values \(found.1), expected [B, H, L, D] and [B, H, L, Dv]."
        )
    }
    guard !found.0.contains(0), !found.1.contains(0) else {
        throw H2OError(operation, "keys have shape \(found.0), expected sizes of at least 1.")
    }
    for (name, new, stored) in [
        ("keys", keys, table?.layouts.keys), ("values", values, table?.layouts.values),
    ] {
        guard [.float32, .float16, .bfloat16].contains(new.dtype) else {
            throw H2OError(
                operation, "\(name) are \(new.dtype), expected float32, float16 or bfloat16.")
        }
        if let stored, stored != RowLayout(new) {
            throw H2OError(
                operation, "\(name) are \(RowLayout(new)), expected \(stored) as the stored rows.")
        }
    }
}

/// Scores float32 [B, Hq, L, N] over the stored rows, and lse float32 [B, Hq, L].
func checkScores(
    _ scores: MLXArray, _ lse: MLXArray?, against table: RowTable?
) throws -> RowTable {
    let operation = "H2OKVCache.updateScores"
    guard let table else {
        throw H2OError(operation, "there are no rows to score, expected an update first.")
    }
    let rows = table.positions.shape
    let found = scores.shape
    let fits =
        found.count == 4 && found[0] == rows[0] && found[3] == rows[2] && !found.contains(0)
        && found[1] % rows[1] == 0
    guard scores.dtype == .float32, fits else {
        throw H2OError(
            operation,
            "scores are \(scores.dtype) \(found), expected float32 [B, Hq, L, N] with B = \(rows[0]), "
                + "Hq a multiple of \(rows[1]), N = \(rows[2]).")
    }
    if let lse, lse.dtype != .float32 || lse.shape != Array(found.dropLast()) {
        throw H2OError(
            operation,
            "lse is \(lse.dtype) \(lse.shape), expected float32 [B, Hq, L] = "
                + "\(Array(found.dropLast())) as the scores.")
    }
    return table
}
