import MLX
import MLXH2O
import MLXLMCommon
import MLXNN

/// Caches for a model of mlx-swift-lm, one per layer. Caches that would keep every row evict
/// instead.
///
/// Layers with a sliding window and recurrent layers keep the model's own caches. Policies that
/// need no scores, such as `.keydiff`, work with any model that is not refused; the others need a
/// model that is ``H2ORouted``.
///
/// - Parameters:
///   - model: a model of mlx-swift-lm or of your own
///   - configuration: the settings of every layer; without a `contextSize`, an ``H2OTransformer``
///     uses the one in its own settings
///   - ownPolicy: your own policy, instead of the one that the settings name
///   - budgets: instead of `maxKVSize`, rows of each layer that evicts, in order, or of each of its
///     KV heads, as ``rowsPerLayer(contentsOf:)`` reads them from a file. Heads with more than the
///     mean drop evicted rows instead of folding them. The model must then not make one array mask
///     for all layers; mlx-swift-lm's do not, unless they ask a cache for an array
/// - Throws: `H2OError` if the policy needs scores, or folds, or KV heads of a layer have different
///   budgets, and the model is not routed; if no layer would keep every row; for a model whose
///   masks do not fit after evictions; and if the number of budgets differs from the layers that
///   evict, or from the KV heads of a layer
public func evictingCaches(
    for model: any LanguageModel, configuration: H2OConfiguration,
    policy ownPolicy: (any EvictionPolicy)? = nil, budgets: [LayerRows]? = nil
) throws -> [any KVCache] {
    let model = (model as? EvictingLanguageModel)?.model ?? model
    let name = "\(type(of: model))"
    let configuration = configuration.forModel(contextSize: (model as? H2OTransformer)?.contextSize)
    let policy = ownPolicy ?? configuration.makePolicy()
    let heads = budgets?.contains(where: \.differ) == true
    if policy.needsScores || policy.folds || heads, !(model is any H2ORouted) {
        let what = ownPolicy.map { "\(type(of: $0))" } ?? configuration.policy.name.rawValue
        throw H2OError(
            "evictingCaches",
            (heads ? "a layer whose KV heads have budgets of their own" : "the policy '\(what)'")
                + " needs attention of MLXH2OLM's, which \(name) does not call: expected a model of "
                + "H2OTransformer.register(in:), one that is H2ORouted, or "
                + (heads ? "a number for each layer." : "the policy keydiff or window."))
    }
    if let reason = refused[name] {
        throw H2OError("evictingCaches", "\(name) cannot be served: \(reason).")
    }
    let caches = model.newCache(parameters: nil)
    let plain = caches.indices.filter { isPlain(caches[$0]) }
    guard !plain.isEmpty else {
        let kinds = Set(caches.map { "\(type(of: $0))" }).sorted().joined(separator: ", ")
        throw H2OError(
            "evictingCaches",
            "\(name) has layers of \(kinds.isEmpty ? "no kind" : kinds), expected a KVCacheSimple "
                + "that evicting caches can replace.")
    }
    if let budgets, budgets.count != plain.count {
        throw H2OError(
            "evictingCaches",
            "found \(budgets.count) budgets, expected one for each of the \(plain.count) layers of "
                + "\(name) that evict.")
    }
    var left = budgets?.makeIterator()
    let mean = budgets.map { $0.map(\.mean).reduce(0, +) / Double(plain.count) } ?? .infinity
    let kvHeads = (model as? any KVCacheDimensionProvider)?.kvHeads ?? []
    return try caches.enumerated().map { layer, cache in
        guard isPlain(cache) else { return cache }
        let name = "layer \(layer) of \(name)"
        guard let rows = left?.next() else {
            return evictingCache(configuration, policy: ownPolicy, name: name)
        }
        if case .heads(let rows) = rows, layer < kvHeads.count, rows.count != kvHeads[layer] {
            throw H2OError(
                "evictingCaches",
                "found \(rows.count) budgets for \(name), expected a number, or one for each of its "
                    + "\(kvHeads[layer]) KV heads.")
        }
        return try evictingCache(
            configuration, rows: rows, mean: mean, policy: ownPolicy, name: name)
    }
}

/// The model with evicting caches: its `newCache` makes those of
/// ``evictingCaches(for:configuration:policy:budgets:)``, so that `generate` and every turn of a
/// `ChatSession` keep the budget.
///
/// - Throws: as ``evictingCaches(for:configuration:policy:budgets:)``
public func evicting(
    _ model: any LanguageModel, configuration: H2OConfiguration,
    policy: (any EvictionPolicy)? = nil, budgets: [LayerRows]? = nil
) throws -> any LanguageModel {
    let model = (model as? EvictingLanguageModel)?.model ?? model
    let make = {
        try evictingCaches(
            for: model, configuration: configuration, policy: policy, budgets: budgets)
    }
    _ = try make()  // what it refuses is refused now
    return EvictingLanguageModel(model, make)
}

/// A loaded model with evicting caches.
///
///     let context = try evicting(loaded, configuration: H2OConfiguration(.init(1024)))
///     let session = ChatSession(context)
///
/// - Throws: as ``evictingCaches(for:configuration:policy:budgets:)``
public func evicting(
    _ context: ModelContext, configuration: H2OConfiguration,
    policy: (any EvictionPolicy)? = nil, budgets: [LayerRows]? = nil
) throws -> ModelContext {
    var context = context
    context.model = try evicting(
        context.model, configuration: configuration, policy: policy, budgets: budgets)
    return context
}

/// Models that make one array mask for all layers from the number of tokens seen instead of from
/// their caches, or that trim rows themselves.
private let refused = [
    "Gemma2Model": "it makes its mask from the number of tokens seen",
    "Qwen3VL": "it makes its mask from the number of tokens seen",
    "Qwen3VLMoE": "it makes its mask from the number of tokens seen",
    "NemotronLabsDiffusionModel": "it takes rows back while it writes",
]

/// Whether a cache keeps every row, unquantised.
private func isPlain(_ cache: any KVCache) -> Bool { type(of: cache) == KVCacheSimple.self }

/// A model whose caches evict.
final class EvictingLanguageModel: Module, LanguageModel {
    let model: any LanguageModel
    private let make: () throws -> [any KVCache]

    init(_ model: any LanguageModel, _ make: @escaping () throws -> [any KVCache]) {
        (self.model, self.make) = (model, make)
        super.init()
    }

    /// Ignores `maxKVSize` and other settings of `parameters`, which are for other caches.
    func newCache(parameters: GenerateParameters?) -> [KVCache] { reported(else: [], make) }

    func callAsFunction(
        _ input: LMInput.Text, cache: [KVCache]?, state: LMOutput.State?
    ) -> LMOutput { model(input, cache: cache, state: state) }

    func callAsFunction(_ inputs: MLXArray, cache: [KVCache]?) -> MLXArray {
        model(inputs, cache: cache)
    }

    func sanitize(weights: [String: MLXArray]) -> [String: MLXArray] {
        model.sanitize(weights: weights)
    }

    func prepare(_ input: LMInput, cache: [KVCache], windowSize: Int?) throws -> PrepareResult {
        try model.prepare(input, cache: cache, windowSize: windowSize)
    }

    /// The same, as later versions of mlx-swift-lm call it.
    func prepare<Prefill>(
        _ input: LMInput, cache: [KVCache], state: LMOutput.State?, prefill: Prefill
    ) throws -> PrepareResult {
        try prepared(model.prepare(_:cache:state:prefill:), input, cache, state, prefill)
    }
}

// mlx-swift-lm 3.31 reads prompts with `prepare(_:cache:windowSize:)`, later versions with
// `prepare(_:cache:state:prefill:)`, whose last argument has a type that 3.31 lacks. Each version
// has one of them; the other is declared here, so that the sources compile with both.

extension LanguageModel {
    @_disfavoredOverload
    func prepare(_ input: LMInput, cache: [KVCache], windowSize: Int?) throws -> PrepareResult {
        .tokens(input.text)
    }

    @_disfavoredOverload
    func prepare(
        _ input: LMInput, cache: [KVCache], state: LMOutput.State?, prefill: Never
    ) throws -> PrepareResult {}
}

/// Calls `prepare` of a model, whatever type its last argument has.
private func prepared<Argument>(
    _ prepare: (LMInput, [KVCache], LMOutput.State?, Argument) throws -> PrepareResult,
    _ input: LMInput, _ cache: [KVCache], _ state: LMOutput.State?, _ argument: some Any
) throws -> PrepareResult {
    guard let argument = argument as? Argument else { return .tokens(input.text) }
    return try prepare(input, cache, state, argument)
}
