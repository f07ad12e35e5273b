// Decodes 40 tokens of a made-up attention layer with room for 12 rows per head, by two policies,
// once with quantised rows, and prints which positions each head still holds. Run it with:
// swift run mlx-h2o-example
import MLX
import MLXH2O
import MLXH2OLM

let (queryHeads, kvHeads, size) = (4, 2, 64)

func random(_ heads: Int, _ seed: Int) -> MLXArray {
    MLXRandom.normal([1, heads, 1, size], dtype: .float32, key: MLXRandom.key(UInt64(seed)))
}

func decode(_ cache: H2OKVCache) throws {
    for step in 0..<40 {
        // `withError` throws what MLX reports; a cache inside a model cannot throw by itself.
        try withError {
            let output = attentionWithCacheUpdate(
                queries: random(queryHeads, 3 * step), keys: random(kvHeads, 3 * step + 1),
                values: random(kvHeads, 3 * step + 2), cache: cache,
                scale: 1 / Float(size).squareRoot())
            eval(output)
        }
    }
    guard let positions = cache.positions?.asArray(Int32.self) else { return }
    print("\(cache.configuration.policy.name.rawValue): \(cache.nbytes) bytes")
    for head in 0..<kvHeads {
        let kept = positions[head * cache.size..<(head + 1) * cache.size].sorted()
        print("after \(cache.offset) tokens, head \(head) keeps \(kept)")
    }
}

let h2o = try H2OConfiguration(.init(12, sinkSize: 2, heavySize: 6), policy: .h2o)
try decode(H2OKVCache(h2o, name: "example layer"))

// The default policy, keydiff, and 8-bit rows: `evictingCache` makes a QuantizedH2OKVCache.
let packed = try H2OConfiguration(.init(12, sinkSize: 2, heavySize: 6), .affine(8))
try decode(evictingCache(packed, name: "example layer"))
