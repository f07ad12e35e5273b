import Foundation
import MLX
import MLXH2O
import MLXH2OLM
import MLXLMCommon
import MLXNN
import Testing

/// Models as mlx-swift-lm has them, with caches that evict.
@Suite struct EvictingTests {
    @Test func unmodifiedModelsKeepTheBudgetOverTurns() throws {
        for bits in [nil, 8] {
            let settings = try H2OConfiguration(.init(12, sinkSize: 2), .named(kvBits: bits))
            let model = try evicting(Unmodified(), configuration: settings)
            // Two conversations: a new cache for each.
            for _ in 0..<2 {
                let cache = model.newCache(parameters: GenerateParameters(maxKVSize: 5))
                for turn in 1...3 {
                    try withError { _ = read(model, cache, turns: 20) }
                    let rows = cache.compactMap { $0 as? H2OKVCache }
                    #expect(rows.map(\.size) == [12, 12])
                    #expect(rows.map(\.offset) == [20 * turn, 20 * turn])
                }
            }
        }
    }

    /// Below the budget nothing differs from the model's own caches.
    @Test func nothingDiffersBelowTheBudget() throws {
        let model = Unmodified()
        let ours = try evicting(model, configuration: H2OConfiguration(.init(64)))
        let found = read(ours, ours.newCache(parameters: nil), turns: 20)
        let expected = read(model, model.newCache(parameters: nil), turns: 20)
        #expect(found.asArray(Float.self) == expected.asArray(Float.self))
    }

    @Test func onlyPlainCachesAreReplaced() throws {
        let model = Unmodified(caches: [KVCacheSimple(), Sliding()])
        let caches = try evictingCaches(for: model, configuration: H2OConfiguration())
        #expect(caches.map { "\(type(of: $0))" } == ["H2OKVCache", "Sliding"])
    }

    /// Rows as Python shared them out.
    @Test func layersKeepTheirOwnBudgets() throws {
        let file = temporaryFile("json")
        defer { try? FileManager.default.removeItem(at: file) }
        try Data(#"{"budgets": [24, 8]}"#.utf8).write(to: file)
        let settings = try H2OConfiguration(.init(16, sinkSize: 2, heavySize: 4), .affine(8))
        let model = try evicting(
            Unmodified(), configuration: settings, budgets: rowsPerLayer(contentsOf: file))
        let cache = model.newCache(parameters: nil)
        try withError { _ = read(model, cache, turns: 40) }
        let rows = cache.compactMap { $0 as? H2OKVCache }
        #expect(rows.map(\.size) == [24, 8])
        #expect(rows.map(\.configuration.heavySize) == [6, 2])
        #expect(rows.map(\.configuration.recentSize) == [16, 4])
        #expect(rows.map(\.configuration.format.kvBits) == [8, 8])
    }

    /// KV heads that differ are in two caches, of a model that is routed.
    @Test(arguments: PolicyName.allCases) func headsKeepTheirOwnBudgets(policy: PolicyName) throws {
        let file = temporaryFile("json")
        defer { try? FileManager.default.removeItem(at: file) }
        try Data(#"{"budgets": [[24, 8], [12, 12]]}"#.utf8).write(to: file)
        let budgets = try rowsPerLayer(contentsOf: file)
        #expect(budgets == [[24, 8], [12, 12]])
        let settings = try H2OConfiguration(.init(16, sinkSize: 2), policy: .init(policy))
        let model = try evicting(routed(), configuration: settings, budgets: budgets)
        let cache = model.newCache(parameters: nil)
        try withError { _ = read(model, cache, turns: 40) }
        let groups = try #require(cache[0] as? HeadGroupsKVCache)
        #expect(groups.heads == [[1], [0]])
        #expect(groups.caches.map(\.size) == [8, 24])
        #expect(
            groups.caches.map(\.name) == [
                "layer 0 of H2OTransformer KV heads 1", "layer 0 of H2OTransformer KV heads 0",
            ])
        #expect((groups.offset, groups.size, groups.maxSize) == (40, 24, 24))
        #expect((cache[1] as? H2OKVCache)?.size == 12)
        // A head with more than the mean of 14 drops what others fold.
        let folds = groups.caches.map(\.configuration.policy.folds)
        #expect(folds == [true, policy != .h2o])
    }

    /// What fits says what caches of every row say.
    @Test func headsThatKeepEveryRowChangeNothing() throws {
        let model = try routed()
        let caches = try evictingCaches(
            for: model, configuration: H2OConfiguration(), budgets: [[64, 48], [48, 64]])
        let expected = read(model, model.newCache(parameters: nil), turns: 40)
        let found = try withError { read(model, caches, turns: 40) }
        for (one, other) in zip(found.asArray(Float.self), expected.asArray(Float.self)) {
            #expect(abs(one - other) < 1e-4 * max(1, abs(other)))
        }
        #expect(Set(expected.asArray(Float.self)).count > 10)
    }

    @Test func budgetsOfOtherHeadsAreRefused() throws {
        for (rows, said) in [
            ([8, 16, 8], "found 3 budgets for layer 1 of H2OTransformer, expected a number"),
            ([], "found 0 budgets"),
            ([16, 4], "sink_size is 4, expected fewer than max_kv_size = 4"),
        ] {
            let error = try #require(
                #expect(throws: H2OError.self) {
                    try evictingCaches(
                        for: routed(), configuration: H2OConfiguration(.init(16)),
                        budgets: [16, .heads(rows)])
                })
            #expect(error.description.contains(said))
        }
        #expect(throws: H2OError.self) {
            try evictingCache(H2OConfiguration(), rows: .heads([]))
        }
    }

    @Test func budgetsThatDoNotSuitAreRefused() throws {
        let settings = try H2OConfiguration(.init(16))
        func message(_ budgets: [LayerRows]) throws -> String {
            try #require(
                #expect(throws: H2OError.self) {
                    try evictingCaches(
                        for: Unmodified(), configuration: settings, budgets: budgets)
                }
            ).description
        }
        #expect(try message([16]).contains("found 1 budgets, expected one for each of the 2"))
        #expect(try message([16, [8, 16]]).contains("KV heads have budgets of their own needs"))
        #expect(
            try message([16, 4]).contains("sink_size is 4, expected fewer than max_kv_size = 4"))
        #expect(
            try message([16, .each(Int.max)]).contains(
                "max_kv_size is 2147483647, expected at most"))
        let file = temporaryFile("json")
        defer { try? FileManager.default.removeItem(at: file) }
        #expect(throws: H2OError.self) { try rowsPerLayer(contentsOf: file) }
        for text in [
            "", "[1, 2]", #"{"budgets": "many"}"#, #"{"budgets": [[8, "all"]]}"#,
            #"{"budgets": [[[8]]]}"#, #"{"budgets": [8, null]}"#, #"{"budgets": [8.5]}"#,
        ] {
            try Data(text.utf8).write(to: file)
            let error = try #require(
                #expect(throws: H2OError.self) { try rowsPerLayer(contentsOf: file) })
            #expect(error.description.contains(#"expected {"budgets": [ROWS, ...]}"#))
        }
    }

    @Test func whatCannotBeServedIsRefusedByName() throws {
        func message(_ model: any LanguageModel, _ policy: PolicyName = .keydiff) throws -> String {
            let settings = try H2OConfiguration(policy: .init(policy))
            return try #require(
                #expect(throws: H2OError.self) { try evicting(model, configuration: settings) }
            ).description
        }
        for policy in [PolicyName.h2o, .h2oEma] {
            #expect(try message(Unmodified(), policy).contains("'\(policy.rawValue)' needs"))
        }
        #expect(try message(Gemma2Model()).contains("Gemma2Model cannot be served: it makes"))
        #expect(try message(Unmodified(caches: [Sliding()])).contains("layers of Sliding"))
        #expect(try message(Unmodified(caches: [])).contains("layers of no kind"))
    }

    @Test func theLastSettingsHold() throws {
        let settings = try H2OConfiguration(.init(8))
        let first = try evicting(Unmodified(), configuration: H2OConfiguration(.init(16)))
        let again = try evicting(first, configuration: settings)
        let caches = again.newCache(parameters: nil).compactMap { $0 as? H2OKVCache }
        #expect(caches.map(\.configuration) == [settings, settings])
    }

    @Test func routedModelsEvictByEveryPolicy() async throws {
        let registry = ModelTypeRegistry<any LanguageModel>()
        await H2OTransformer.register(in: registry)
        for type in ["llama", "qwen3"] {
            for policy in PolicyName.allCases {
                let model = try await registry.createModel(
                    configuration: Data(config(type).utf8), modelType: type)
                let settings = try H2OConfiguration(.init(12, sinkSize: 2), policy: .init(policy))
                let evicting = try evicting(model, configuration: settings)
                let cache = evicting.newCache(parameters: nil)
                try withError { _ = read(evicting, cache, turns: 20) }
                #expect(cache.compactMap { ($0 as? H2OKVCache)?.size } == [12, 12])
            }
        }
    }

    /// Files say what their model has. Weights are not compared.
    @Test func filesOfOtherModelsAreRefused() throws {
        let url = temporaryFile()
        defer { try? FileManager.default.removeItem(at: url) }
        let model = try routed()
        let evicting = try evicting(model, configuration: H2OConfiguration(.init(12)))
        let cache = evicting.newCache(parameters: nil)
        try withError { _ = read(evicting, cache, turns: 20) }
        try H2OKVCache.save(cache, to: url)
        #expect(try H2OKVCache.load(from: url, for: evicting).caches.count == 2)
        #expect(try H2OKVCache.load(from: url, for: Unmodified()).caches.count == 2)
        let (arrays, texts) = try contents(of: url)
        for (from, to, said) in [
            ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", "holds 2 layers, expected 3"),
            ("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4", "expected 4 of 32"),
            ("\"head_dim\": 32", "\"head_dim\": 64", "2 KV heads of 32 elements in layer 0"),
        ] {
            let other = try routed(config("llama").replacingOccurrences(of: from, with: to))
            let error = #expect(throws: H2OError.self) {
                try H2OKVCache.load(from: url, for: other)
            }
            #expect(error?.description.contains(said) == true, "\(error?.description ?? "")")
        }
        for (fact, value, refused) in [
            ("rope_theta", "100", false), ("rope_theta", "10000.0", true),
            ("rope_scaling", "null", false), ("rope_scaling", #"{"type": "default"}"#, false),
            ("rope_scaling", #"{"type": "yarn", "factor": 4.0}"#, true),
            ("fingerprint of weights", "\"0\"", false), ("anything else", "1", false),
        ] {
            let facts = try JSONEncoder().encode([fact: value])
            let about =
                #"{"format": 5, "layers": 2, "facts": \#(String(decoding: facts, as: UTF8.self))}"#
            try save(
                arrays: arrays, metadata: texts.merging(["0.mlx_h2o": about]) { $1 }, url: url)
            _ = try H2OKVCache.load(from: url)
            let found = Result { try H2OKVCache.load(from: url, for: evicting) }
            #expect((try? found.get()) == nil || !refused, "\(fact) = \(value)")
            #expect((try? found.get()) != nil || refused, "\(fact) = \(value)")
        }
    }

    /// Files of transformers 5 name the rotary embedding in one setting.
    @Test func theRotaryEmbeddingIsReadFromEitherPlace() throws {
        let tokens = MLXArray([Int32(1), 2, 3, 4]).expandedDimensions(axis: 0)
        func said(_ rope: String) throws -> [Float] {
            let settings = config("qwen3").replacingOccurrences(
                of: "\"rope_theta\": 100", with: rope)
            return try routed(settings)(tokens, cache: nil).asArray(Float.self)
        }
        let nested = try said(#""rope_parameters": {"rope_type": "default", "rope_theta": 77}"#)
        #expect(try nested == said("\"rope_theta\": 77"))
        #expect(try nested != said("\"rope_theta\": 78"))
        let halved = try said(
            #""rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 77}"#)
        #expect(
            try halved
                == said(#""rope_theta": 77, "rope_scaling": {"type": "linear", "factor": 2}"#))
        #expect(throws: H2OError.self) {
            try said(#""rope_theta": 77, "rope_parameters": {"rope_type": "yarn"}"#)
        }
    }

    @Test func cachesHaveTheContextThatAModelNames() throws {
        let named = config("llama").replacingOccurrences(
            of: "\"vocab_size\"", with: "\"max_position_embeddings\": 99, \"vocab_size\"")
        for (text, given, expected) in [
            (named, nil, 99), (named, 50, 50), (named, 0, 0), (config("llama"), nil, nil),
        ] as [(String, Int?, Int?)] {
            let model = H2OTransformer(
                try JSONDecoder().decode(H2OTransformerConfiguration.self, from: Data(text.utf8)))
            let caches = try evictingCaches(
                for: model, configuration: H2OConfiguration(.init(contextSize: given)))
            let found = caches.compactMap { ($0 as? H2OKVCache)?.configuration.contextSize }
            #expect(found == (expected.map { [$0, $0] } ?? []))
        }
    }

    /// What the original models take where their settings do not say it.
    @Test func rotaryPositionsHaveTheBaseOfTheOriginals() throws {
        for (type, base) in [("llama", 10_000), ("qwen3", 1_000_000)] {
            func output(_ rope: String) throws -> [Float] {
                let text = config(type).replacingOccurrences(of: "\"rope_theta\": 100", with: rope)
                let model = try routed(text)
                return model(MLXArray([1, 2, 3, 4] as [Int32], [1, 4]), cache: nil).asArray(
                    Float.self)
            }
            let usual = try output("\"rope_scaling\": null")
            #expect(try usual == output("\"rope_theta\": \(base)"))
            #expect(try usual != output("\"rope_theta\": 100"))
        }
    }

    @Test func configurationsThatFitNoModelThrow() throws {
        for (from, to) in [
            ("\"llama\"", "\"gemma\""),
            ("\"num_attention_heads\": 4", "\"num_attention_heads\": 3"),
            ("\"vocab_size\": 32", "\"vocab_size\": -1"),
            ("\"rope_theta\": 100", "\"rope_scaling\": {\"type\": \"yarn\"}"),
            ("\"hidden_size\": 32", "\"hidden_size\": 9999999999"),
            ("\"head_dim\": 32", "\"head_dim\": 999999999"),
        ] {
            let file = Data(config("llama").replacingOccurrences(of: from, with: to).utf8)
            #expect(throws: H2OError.self, "\(to)") {
                try JSONDecoder().decode(H2OTransformerConfiguration.self, from: file)
            }
        }
    }
}

/// Random weights: those of a new model are zeros.
private func routed(_ settings: String = config("llama")) throws -> H2OTransformer {
    let model = H2OTransformer(
        try JSONDecoder().decode(H2OTransformerConfiguration.self, from: Data(settings.utf8)))
    let arrays = model.parameters().flattened().sorted { $0.0 < $1.0 }
    let weights = arrays.enumerated().map { index, array in
        let key = MLXRandom.key(UInt64(index))
        return (array.0, MLXRandom.normal(array.1.shape, dtype: .float32, key: key) * Float(0.3))
    }
    return try model.update(
        parameters: .unflattened(Dictionary(uniqueKeysWithValues: weights)), verify: .all)
}

private func config(_ type: String) -> String {
    """
    {"model_type": "\(type)", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
     "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 32,
     "rms_norm_eps": 1e-5, "rope_theta": 100, "tie_word_embeddings": false}
    """
}

/// Tokens through `prepare` and then one by one; the last logits.
@discardableResult
private func read(
    _ model: any LanguageModel, _ cache: [any KVCache], turns count: Int
) -> MLXArray {
    let tokens = MLXArray((0..<count).map { Int32($0 * 7 % 32) })
    guard
        case .tokens(let rest) = try? model.prepare(
            LMInput(tokens: tokens[..<14]), cache: cache, windowSize: 5)
    else { return tokens }
    var logits = model(rest.tokens.expandedDimensions(axis: 0), cache: cache)
    for place in 14..<count {
        logits = model(tokens[place..<place + 1].expandedDimensions(axis: 0), cache: cache)
    }
    eval([logits] + cache.flatMap { $0.innerState() })
    return logits
}

/// A layer cache of someone else.
private final class Sliding: KVCache {
    let offset = 0
    let maxSize: Int? = 4
    var state: [MLXArray] = []
    var metaState: [String] = []
    let isTrimmable = false

    func innerState() -> [MLXArray] { [] }
    func trim(_ n: Int) -> Int { 0 }
    func copy() -> any KVCache { self }
    func update(keys: MLXArray, values: MLXArray) -> (MLXArray, MLXArray) { (keys, values) }
    func makeMask(
        n: Int, windowSize: Int?, returnArray: Bool
    ) -> MLXFast.ScaledDotProductAttentionMaskMode { .causal }
}

/// Two layers of attention that call mlx-swift-lm's own function: a model that knows nothing of us.
private class Unmodified: Module, LanguageModel {
    private let embeddings = MLXRandom.normal([32, 64], dtype: .float32, key: MLXRandom.key(1))
    private let caches: [any KVCache]?

    init(caches: [any KVCache]? = nil) { self.caches = caches }

    func newCache(parameters: GenerateParameters?) -> [any KVCache] {
        caches ?? (0..<2).map { _ in KVCacheSimple() }
    }

    func prepare(_ input: LMInput, cache: [any KVCache], windowSize: Int?) throws -> PrepareResult {
        var rest = input.text.tokens
        while rest.size > windowSize ?? 512 {
            _ = self(rest[..<5].expandedDimensions(axis: 0), cache: cache)
            rest = rest[5...]
        }
        return .tokens(LMInput.Text(tokens: rest))
    }

    func callAsFunction(_ inputs: MLXArray, cache: [any KVCache]?) -> MLXArray {
        var hidden = take(embeddings, inputs, axis: 0)
        let mask = createAttentionMask(h: hidden, cache: cache?.first)
        for layer in 0..<2 {
            let rows = hidden.reshaped(1, inputs.dim(1), 2, 32).transposed(0, 2, 1, 3)
            let attended = MLXLMCommon.attentionWithCacheUpdate(
                queries: rows, keys: rows, values: rows, cache: cache?[layer], scale: 0.2,
                mask: mask)
            hidden = hidden + attended.transposed(0, 2, 1, 3).reshaped(1, inputs.dim(1), 64)
        }
        return matmul(hidden, embeddings.transposed())
    }
}

private final class Gemma2Model: Unmodified {}
