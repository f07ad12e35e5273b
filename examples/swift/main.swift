// Decodes 40 tokens of a made-up attention layer with room for 12 rows per head, and prints which
// positions each head still holds. Run it with: swift run mlx-h2o-example
import MLX
import MLXH2O
import MLXH2OLM

let configuration = try H2OConfiguration(maxKVSize: 12, sinkSize: 2, heavySize: 6)
let cache = H2OKVCache(configuration, name: "example layer")
let (queryHeads, kvHeads, size) = (4, 2, 64)

func random(_ heads: Int, _ seed: Int) -> MLXArray {
    MLXRandom.normal([1, heads, 1, size], dtype: .float32, key: MLXRandom.key(UInt64(seed)))
}

for step in 0..<40 {
    // `withError` throws what MLX reports; a cache inside a model cannot throw by itself.
    try withError {
        let output = attentionWithCacheUpdate(
            queries: random(queryHeads, 3 * step), keys: random(kvHeads, 3 * step + 1),
            values: random(kvHeads, 3 * step + 2), cache: cache, scale: 1 / Float(size).squareRoot()
        )
        eval(output)
    }
    if step % 8 == 7, let positions = cache.positions {
        let kept = positions.asArray(Int32.self)
        for head in 0..<kvHeads {
            let rows = kept[head * cache.size..<(head + 1) * cache.size].sorted()
            print("after \(cache.offset) tokens, head \(head) keeps \(rows)")
        }
    }
}
