import Foundation
import MLXH2O

/// A mistake in the command line.
struct Usage: Error, CustomStringConvertible {
    let description: String
}

/// What the command line asks for. The flags are those of `mlx_h2o generate`.
struct Arguments {
    var model = ""
    var prompt: String?
    var promptTokens: [Int]?
    var maxTokens = 100
    var prefillStep = 2048
    var cacheFile: String?
    var savedCache: String?
    var backend: H2OBackend?
    var printsTokens = false
    /// Nil: the caches of the model, which keep every row.
    var configuration: H2OConfiguration?
    /// A file of rows per layer.
    var budgets: String?
    /// A flag names a setting of the cache.
    var namesSettings = false

    static let usage = """
        usage: h2o-generate --model DIR --prompt TEXT [flags]
          --model DIR               a Llama or Qwen3 model: config.json, *.safetensors, tokenizer.json
          --prompt TEXT             what to go on with; - reads standard input
          --prompt-tokens 1,2,3     the same as token ids
          --max-tokens N            tokens to generate (100)
          --prefill-step-size N     tokens of the prompt that are read at a time (2048)
          --prompt-cache-file FILE  go on from a file of mlx_h2o cache_prompt or --save-prompt-cache
          --save-prompt-cache FILE  write the cache at the end, for both languages
          --print-tokens            print token ids in place of text
          --backend NAME            native or composed (the best one)
        KV cache, as in mlx_h2o generate:
          --max-kv-size ROWS        rows per head, at most (256); none: no limit
          --budgets FILE            rows of each layer or KV head, of mlx_h2o layers --output
          --policy NAME             keydiff, window, h2o or h2o-ema
          --sink-size N  --heavy-size N  --recent-size N  --evict-every N  --decay A
          --kv-bits N  --v-bits N  --kv-group-size N
          --dense-size N            newest rows that stay unquantised (8 with --max-kv-size none and
                                    values of at most 4 bits; else 0)
          --kv-format NAME          turbo3 and others, in the place of --kv-bits
          --context-size TOKENS     rows further back go first (what the model says); 0: they do not
        """

    init(_ words: [String]) throws {
        var given: [String: String] = [:]
        var rest = words[...]
        while let word = rest.popFirst() {
            guard word.hasPrefix("--"), Self.known.contains(word) else {
                throw Usage(description: "\(word) is not a flag (--help says what there is)")
            }
            if Self.switches.contains(word) {
                given[word] = ""
            } else if let value = rest.popFirst() {
                given[word] = value
            } else {
                throw Usage(description: "\(word) expects a value")
            }
        }
        func number(_ flag: String, atLeast least: Int = 0) throws -> Int? {
            guard let text = given[flag] else { return nil }
            guard let found = Int(text), found >= least else {
                throw Usage(description: "\(flag) is '\(text)', expected a number from \(least) on")
            }
            return found
        }
        guard let model = given["--model"] else { throw Usage(description: "--model is missing") }
        self.model = model
        prompt = given["--prompt"]
        promptTokens = try given["--prompt-tokens"].map(Self.tokens)
        guard (prompt == nil) != (promptTokens == nil) else {
            throw Usage(description: "expected one of --prompt and --prompt-tokens")
        }
        maxTokens = try number("--max-tokens") ?? maxTokens
        prefillStep = try number("--prefill-step-size", atLeast: 1) ?? prefillStep
        cacheFile = given["--prompt-cache-file"]
        savedCache = given["--save-prompt-cache"]
        try savedCache.map { try Self.checkPlace($0) }
        printsTokens = given["--print-tokens"] != nil
        if let name = given["--backend"] {
            guard let found = H2OBackend(rawValue: name) else {
                throw Usage(description: "--backend is '\(name)', expected native or composed")
            }
            backend = found
        }
        let settings = Self.settings.intersection(given.keys)
        namesSettings = !settings.isEmpty
        let isUnbounded = given["--max-kv-size"] == "none"
        if isUnbounded, settings.count == 1, savedCache == nil { return }
        budgets = given["--budgets"]
        let decay = given["--decay"].map { Double($0) ?? .nan }
        configuration = try H2OConfiguration(
            .init(
                isUnbounded ? nil : number("--max-kv-size") ?? 256,
                sinkSize: number("--sink-size") ?? 4, heavySize: number("--heavy-size"),
                recentSize: number("--recent-size"), evictEvery: number("--evict-every"),
                contextSize: number("--context-size")),
            .named(
                kvBits: number("--kv-bits"), valueBits: number("--v-bits"),
                denseSize: number("--dense-size"), groupSize: number("--kv-group-size") ?? 64,
                kvFormat: given["--kv-format"]),
            policy: .init(
                given["--policy"].map { try PolicyName(named: $0) } ?? .keydiff,
                decay: decay ?? 0.95))
    }

    private static let switches: Set = ["--print-tokens"]
    private static let settings: Set = [
        "--max-kv-size", "--budgets", "--policy", "--sink-size", "--heavy-size", "--recent-size",
        "--evict-every", "--decay", "--kv-bits", "--v-bits", "--kv-group-size", "--kv-format",
        "--context-size", "--dense-size",
    ]
    private static let known = settings.union(switches).union([
        "--model", "--prompt", "--prompt-tokens", "--max-tokens", "--prefill-step-size",
        "--prompt-cache-file", "--save-prompt-cache", "--backend",
    ])

    /// A file is written at the end: whether that will go is known before.
    private static func checkPlace(_ file: String) throws {
        let place = URL(fileURLWithPath: file)
        guard place.pathExtension == "safetensors" else {
            throw Usage(description: "--save-prompt-cache is '\(file)', expected FILE.safetensors")
        }
        func isFolder(_ path: String) -> Bool {
            var found: ObjCBool = false
            return FileManager.default.fileExists(atPath: path, isDirectory: &found)
                && found.boolValue
        }
        let folder = place.deletingLastPathComponent().path
        guard isFolder(folder), FileManager.default.isWritableFile(atPath: folder), !isFolder(file)
        else { throw Usage(description: "--save-prompt-cache: \(file) cannot be written") }
    }

    private static func tokens(_ text: String) throws -> [Int] {
        try text.split(separator: ",").map { word in
            guard let token = Int(word.trimmingCharacters(in: .whitespaces)) else {
                throw Usage(description: "--prompt-tokens holds '\(word)', expected token ids")
            }
            return token
        }
    }
}
