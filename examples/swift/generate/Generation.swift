import Foundation
import MLX
import MLXH2OLM
import MLXLMCommon

/// Greedy generation, in the order of mlx_lm's: the next step is on its way while a token is given
/// to `use`, and every token that was given is in the cache.
///
/// - Parameters:
///   - prompt: at least one token; all but the last are read in chunks of `step`
///   - use: gets each token; false ends the text
func generate(
    _ model: H2OTransformer, prompt: [Int], cache: [any KVCache], step: Int, maxTokens: Int,
    use: (Int) throws -> Bool
) throws {
    // What a step reports ends the text there, not after it.
    func next(_ tokens: MLXArray) throws -> MLXArray {
        try withError {
            let logits = model(tokens.expandedDimensions(axis: 0), cache: cache)
            return argMax(logits[0..., (-1)...], axis: -1).reshaped(1)
        }
    }
    var start = 0
    while prompt.count - start > 1 {
        let end = min(start + step, prompt.count - 1)
        _ = try next(MLXArray(Array(prompt[start..<end])))
        eval(cache.flatMap { $0.innerState() })
        start = end
    }
    var token = try next(MLXArray(Array(prompt[start...])))
    asyncEval([token])
    // A process must not end while a step is on its way: MLX's threads would run without its memory.
    defer { eval([token]) }
    for _ in 0..<maxTokens {
        let given = token
        token = try next(given)
        asyncEval([token])
        guard try use(given.item(Int.self)) else { return }
    }
}
