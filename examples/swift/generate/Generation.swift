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
    func next(_ tokens: MLXArray) -> MLXArray {
        let logits = model(tokens.expandedDimensions(axis: 0), cache: cache)
        return argMax(logits[0..., (-1)...], axis: -1).reshaped(1)
    }
    var start = 0
    while prompt.count - start > 1 {
        let end = min(start + step, prompt.count - 1)
        _ = model(MLXArray(Array(prompt[start..<end])).expandedDimensions(axis: 0), cache: cache)
        eval(cache.flatMap { $0.innerState() })
        start = end
    }
    var token = next(MLXArray(Array(prompt[start...])))
    asyncEval([token])
    // A process must not end while a step is on its way: MLX's threads would run without its memory.
    defer { eval([token]) }
    for _ in 0..<maxTokens {
        let given = token
        token = next(given)
        asyncEval([token])
        guard try use(given.item(Int.self)) else { return }
    }
}
