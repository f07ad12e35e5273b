import MLX

/// Attention mass times the length of the value; a share of the places by key diversity.
///
/// The importance of a row is its attention mass: its weights, summed over all queries since it was
/// added and over the query heads of the KV head (Zhang et al. 2023, H2O). It is divided by the root
/// of the row's age, the number of queries that could see it. Ranks by mass are relative to the
/// head's largest, so at most 1; rows kept for their diversity get 2 more, and nothing is folded into
/// them. Of the evicted rows, the nearer half is folded into the nearest rows that stay, weighted by
/// these ranks. Without folding, the diversity of a row is the largest among it and the next two.
public struct H2OPolicy: EvictionPolicy {
    /// Of the rows that ranks decide about, the share kept for the diversity of their keys.
    public let diversity: Double
    /// Whether evicted rows are folded into others; else they are dropped.
    public let folds: Bool

    /// `diversity` is from 0 to 1; not checked here.
    public init(diversity: Double = 0.5, folds: Bool = true) {
        (self.diversity, self.folds) = (diversity, folds)
    }

    public var needsScores: Bool { true }
    public var needsWeights: Bool { true }
    public var chunkQueries: Int? { nil }
    public var kind: ChunkScores? { .mass }
    public var foldShare: Double { 0.5 }

    /// Nothing is folded into rows kept for their diversity.
    public func takes(_ ranks: MLXArray) -> MLXArray { ranks .<= Float(1) }

    public func accumulate(
        _ importance: MLXArray, scores: MLXArray, positions: MLXArray, isMasked: Bool
    ) throws -> MLXArray {
        let perHead = scores.reshaped([scores.dim(0), importance.dim(1), -1, scores.dim(3)])
        return which(isNaN(importance), Float(0), importance) + perHead.sum(axis: 2)
    }

    public func rank(_ rows: PolicyRows) throws -> MLXArray {
        let values = try rows.values.asType(.float32)
        let age = Int32(clamping: rows.offset) - rows.positions
        let heavy = rows.importance * sqrt((values * values).sum(axis: 3) / age)
        let greatest = which(isNaN(heavy), Float(0), heavy).max(axis: 2, keepDims: true)
        let ranks = heavy / maximum(greatest, Float(1e-9))
        guard (0...1).contains(diversity) else {
            throw failure("diversity is \(diversity), expected 0 to 1.")
        }
        let diverse = Int(diversity * Double(rows.places))
        guard diverse > 0 else { return ranks }
        var apart = try keyDiversity(rows.keys)
        if !folds {  // as diverse as the most diverse of it and the next two, by position
            let order = argSort(rows.positions, axis: 2)
            let found = takeAlong(apart, order, axis: 2)
            for _ in 0..<2 {
                let (own, next) = (found[.ellipsis, ..<(-1)], found[.ellipsis, 1...])
                found[.ellipsis, ..<(-1)] = maximum(own, next)
            }
            apart = putAlong(apart, order, values: found, axis: 2)
        }
        let stay = try keepIndices(
            apart, positions: rows.positions, keep: rows.keep - rows.places + diverse,
            sinkSize: rows.sinkSize, recentStart: rows.recentStart)
        let none = MLXArray.zeros(ranks.shape, dtype: .float32)
        return ranks + putAlong(none, stay, values: MLXArray(Float(2)), axis: 2)
    }
}
