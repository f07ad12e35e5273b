import Foundation
import MLX
import MLXH2O
import MLXH2OLM

/// Seconds per decode step of one layer at a full budget, for each of `count` turns of `steps`
/// steps: the graph is built, and evaluated only between turns, outside the measured time.
func runHostTime(_ parity: Case) throws -> [String: MLXArray] {
    let cache = evictingCache(try configuration(of: parity), name: parity.name)
    let rows = try ["queries", "keys", "values"].map { try parity.tensor($0) }
    let scale = try parity.field(\.scale, "scale")
    let steps = try parity.field(\.steps, "steps")
    func step() -> MLXArray {
        attentionWithCacheUpdate(
            queries: rows[0], keys: rows[1], values: rows[2], cache: cache, scale: scale)
    }
    for _ in 0..<(cache.configuration.maxKVSize ?? 0) + 40 { eval(step()) }
    let seconds = try (0..<parity.field(\.count, "count")).map { _ in
        let start = DispatchTime.now().uptimeNanoseconds
        var output = rows[0]
        for _ in 0..<steps { output = step() }
        let end = DispatchTime.now().uptimeNanoseconds
        eval(output)
        return Float(end - start) / 1e9 / Float(steps)
    }
    return ["seconds": MLXArray(seconds)]
}
