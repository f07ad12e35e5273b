// Greedy text of a Llama or Qwen3 model with a cache that evicts:
//     h2o-generate --model DIR --prompt "The ship was" --max-kv-size 128 --policy h2o
import Foundation
import MLX
import MLXH2O
import MLXH2OLM
import MLXLMCommon

private func say(_ text: String) {
    FileHandle.standardError.write(Data("h2o-generate: \(text)\n".utf8))
}

private func run(_ arguments: Arguments) throws {
    let directory = ModelDirectory(url: URL(fileURLWithPath: arguments.model, isDirectory: true))
    let model = try directory.load()
    let needsText = arguments.prompt != nil || !arguments.printsTokens
    let tokenizer = needsText ? try directory.tokenizer() : nil
    let prompt = try prompt(arguments, tokenizer)
    if let wrong = prompt.first(where: { !(0..<model.vocabularySize).contains($0) }) {
        throw Usage(description: "token \(wrong) is not below \(model.vocabularySize)")
    }
    guard !prompt.isEmpty else { throw Usage(description: "the prompt has no tokens") }
    let cache = try caches(arguments, model)
    let ends = try directory.endTokens()
    var generated: [Int] = []
    let start = Date()
    try generate(
        model, prompt: prompt, cache: cache, step: arguments.prefillStep,
        maxTokens: arguments.maxTokens
    ) { token in
        generated.append(token)
        if ends.contains(token) { return false }
        if !arguments.printsTokens, let tokenizer {
            FileHandle.standardOutput.write(tokenizer.bytes(of: token))
        }
        return true
    }
    print(arguments.printsTokens ? generated.map(String.init).joined(separator: " ") : "")
    if let file = arguments.savedCache {
        try H2OKVCache.save(cache, to: URL(fileURLWithPath: file))
    }
    let seconds = Date().timeIntervalSince(start)
    let size = (cache.first as? H2OKVCache)?.size ?? (cache.first as? HeadGroupsKVCache)?.size
    let rows = size.map { "\($0) of \(cache[0].offset) rows kept" }
    say(
        String(format: "%d and %d tokens in %.2f s", prompt.count, generated.count, seconds)
            + (rows.map { ", \($0)" } ?? ""))
}

private func prompt(_ arguments: Arguments, _ tokenizer: Tokenizer?) throws -> [Int] {
    if let tokens = arguments.promptTokens { return tokens }
    guard let tokenizer, let text = arguments.prompt else { return [] }
    guard text == "-" else { return try tokenizer.encode(text) }
    let input = FileHandle.standardInput.readDataToEndOfFile()
    return try tokenizer.encode(String(decoding: input, as: UTF8.self))
}

private func caches(_ arguments: Arguments, _ model: H2OTransformer) throws -> [any KVCache] {
    guard let file = arguments.cacheFile else {
        guard let configuration = arguments.configuration else {
            return model.newCache(parameters: nil)
        }
        let budgets = try arguments.budgets.map {
            try rowsPerLayer(contentsOf: URL(fileURLWithPath: $0))
        }
        return try evictingCaches(for: model, configuration: configuration, budgets: budgets)
    }
    guard !arguments.namesSettings else {
        throw Usage(description: "--prompt-cache-file brings the settings of the cache")
    }
    return try H2OKVCache.load(from: URL(fileURLWithPath: file), for: model).caches
}

private func main() throws {
    let words = Array(CommandLine.arguments.dropFirst())
    guard !words.contains("--help") else { return print(Arguments.usage) }
    let arguments = try Arguments(words)
    try withError {
        try withBackend(arguments.backend) { try run(arguments) }
    }
}

do {
    try main()
} catch let usage as Usage {
    say("error: \(usage)")
    exit(2)
} catch MLXError.caught(let message) {
    say("error: \(message)")
    exit(1)
} catch {
    say("error: \(error)")
    exit(1)
}
