import Foundation
import MLX
import MLXH2O
import MLXLMCommon
import MLXNN

/// A model that calls ``attentionWithCacheUpdate(queries:keys:values:cache:scale:mask:)`` of this
/// module in every layer, so that a cache sees its queries: any policy works.
///
/// A model of your own conforms once its source imports that function by name.
public protocol H2ORouted: LanguageModel {}

/// Llama or Qwen3, evicting by any policy.
///
/// Other models of mlx-swift-lm evict by policies that need no scores: see
/// ``evictingCaches(for:configuration:policy:budgets:)``. Weights have their original names.
public final class H2OTransformer: Module, H2ORouted, KVCacheDimensionProvider, LoRAModel {
    public var kvHeads: [Int] { model.layers.map { _ in configuration.kvHeads } }
    /// For adapters: every layer.
    public var loraLayers: [Module] { model.layers }
    /// The size of the vocabulary.
    public var vocabularySize: Int { configuration.vocabularySize }
    /// Tokens that the model was trained for, if its settings say so.
    public var contextSize: Int? { configuration.maxPositions }
    /// Elements of a key.
    public var headSize: Int { configuration.headSize }

    let configuration: H2OTransformerConfiguration
    let model: TransformerBody
    @ModuleInfo(key: "lm_head") var head: Linear?

    /// A model with random weights, to be replaced by those of a file.
    public init(_ configuration: H2OTransformerConfiguration) {
        self.configuration = configuration
        model = TransformerBody(configuration)
        super.init()
        if !configuration.tiesEmbeddings {
            _head.wrappedValue = Linear(
                configuration.hiddenSize, configuration.vocabularySize, bias: false)
        }
    }

    /// Register these types, so that models are made as ``H2OTransformer`` from now on: MLXLLM's
    /// model factory uses the registry `LLMTypeRegistry.shared`.
    public static func register(in registry: ModelTypeRegistry<any LanguageModel>) async {
        for type in H2OTransformerConfiguration.modelTypes {
            await registry.registerModelType(type) { file in
                H2OTransformer(
                    try JSONDecoder().decode(H2OTransformerConfiguration.self, from: file))
            }
        }
    }

    /// Logits [B, L, vocabulary] of tokens [B, L].
    public func callAsFunction(_ inputs: MLXArray, cache: [KVCache]?) -> MLXArray {
        let hidden = model(inputs, cache)
        return head.map { $0(hidden) } ?? model.embeddings.asLinear(hidden)
    }

    /// Drops rotary frequencies, which are computed, and an output layer tied to the embeddings.
    public func sanitize(weights: [String: MLXArray]) -> [String: MLXArray] {
        weights.filter { name, _ in
            !name.contains("rotary_emb.inv_freq") && (head != nil || !name.hasPrefix("lm_head."))
        }
    }

    public func prepare(
        _ input: LMInput, cache: [KVCache], windowSize: Int?
    ) throws -> PrepareResult {
        let step = max(1, windowSize ?? 512)
        var rest = input.text.tokens
        while rest.size > step {
            _ = self(rest[..<step][.newAxis], cache: cache.isEmpty ? nil : cache)
            eval(cache.flatMap { $0.innerState() })
            rest = rest[step...]
        }
        return .tokens(LMInput.Text(tokens: rest))
    }

    /// The same, as later versions of mlx-swift-lm call it; only `stepSize` of `prefill` matters.
    public func prepare<Prefill>(
        _ input: LMInput, cache: [KVCache], state: LMOutput.State?, prefill: Prefill
    ) throws -> PrepareResult {
        let step = Mirror(reflecting: prefill).descendant("stepSize") as? Int
        return try prepare(input, cache: cache, windowSize: step)
    }
}

final class TransformerBody: Module {
    @ModuleInfo(key: "embed_tokens") var embeddings: Embedding
    let layers: [TransformerLayer]
    let norm: RMSNorm

    init(_ configuration: H2OTransformerConfiguration) {
        layers = (0..<configuration.layers).map { _ in TransformerLayer(configuration) }
        norm = RMSNorm(dimensions: configuration.hiddenSize, eps: configuration.normEps)
        super.init()
        _embeddings.wrappedValue = Embedding(
            embeddingCount: configuration.vocabularySize, dimensions: configuration.hiddenSize)
    }

    func callAsFunction(_ tokens: MLXArray, _ cache: [KVCache]?) -> MLXArray {
        var hidden = embeddings(tokens)
        let fits = cache.map { $0.count == layers.count } ?? true
        if !fits {
            H2OError.report(
                H2OError(
                    "H2OTransformer",
                    "found \(cache?.count ?? 0) caches, expected one for each of \(layers.count) "
                        + "layers."))
        }
        let cache = fits ? cache : nil
        let mask = createAttentionMask(h: hidden, cache: cache?.first)
        for (index, layer) in layers.enumerated() {
            hidden = layer(hidden, mask, cache?[index])
        }
        return norm(hidden)
    }
}

final class TransformerLayer: Module {
    @ModuleInfo(key: "self_attn") var attention: TransformerAttention
    @ModuleInfo var mlp: TransformerMLP
    @ModuleInfo(key: "input_layernorm") var attentionNorm: RMSNorm
    @ModuleInfo(key: "post_attention_layernorm") var mlpNorm: RMSNorm

    init(_ configuration: H2OTransformerConfiguration) {
        let (size, eps) = (configuration.hiddenSize, configuration.normEps)
        super.init()
        _attention.wrappedValue = TransformerAttention(configuration)
        _mlp.wrappedValue = TransformerMLP(configuration)
        _attentionNorm.wrappedValue = RMSNorm(dimensions: size, eps: eps)
        _mlpNorm.wrappedValue = RMSNorm(dimensions: size, eps: eps)
    }

    func callAsFunction(
        _ x: MLXArray, _ mask: MLXFast.ScaledDotProductAttentionMaskMode, _ cache: KVCache?
    ) -> MLXArray {
        let hidden = x + attention(attentionNorm(x), mask, cache)
        return hidden + mlp(mlpNorm(hidden))
    }
}

final class TransformerAttention: Module {
    @ModuleInfo(key: "q_proj") var queries: Linear
    @ModuleInfo(key: "k_proj") var keys: Linear
    @ModuleInfo(key: "v_proj") var values: Linear
    @ModuleInfo(key: "o_proj") var output: Linear
    @ModuleInfo(key: "q_norm") var queryNorm: RMSNorm?
    @ModuleInfo(key: "k_norm") var keyNorm: RMSNorm?

    private let heads: Int
    private let kvHeads: Int
    private let scale: Float
    private let rope: any RoPELayer

    init(_ configuration: H2OTransformerConfiguration) {
        let (size, headSize) = (configuration.hiddenSize, configuration.headSize)
        let bias = configuration.attentionBias
        heads = configuration.heads
        kvHeads = configuration.kvHeads
        scale = Float(1 / Double(headSize).squareRoot())
        rope = initializeRope(
            dims: headSize, base: configuration.ropeBase,
            traditional: configuration.ropeTraditional, scalingConfig: configuration.ropeScaling,
            maxPositionEmbeddings: configuration.maxPositions)
        super.init()
        _queries.wrappedValue = Linear(size, heads * headSize, bias: bias)
        _keys.wrappedValue = Linear(size, kvHeads * headSize, bias: bias)
        _values.wrappedValue = Linear(size, kvHeads * headSize, bias: bias)
        _output.wrappedValue = Linear(heads * headSize, size, bias: bias)
        if configuration.normalisesHeads {
            _queryNorm.wrappedValue = RMSNorm(dimensions: headSize, eps: configuration.normEps)
            _keyNorm.wrappedValue = RMSNorm(dimensions: headSize, eps: configuration.normEps)
        }
    }

    func callAsFunction(
        _ x: MLXArray, _ mask: MLXFast.ScaledDotProductAttentionMaskMode, _ cache: KVCache?
    ) -> MLXArray {
        let (batch, length) = (x.dim(0), x.dim(1))
        /// [B, L, heads * D] as [B, heads, L, D].
        func split(_ rows: MLXArray, _ heads: Int, _ norm: RMSNorm? = nil) -> MLXArray {
            let rows = rows.reshaped(batch, length, heads, -1)
            return (norm.map { $0(rows) } ?? rows).transposed(0, 2, 1, 3)
        }
        let offset = cache?.ropeOffset
        let attended = attentionWithCacheUpdate(
            queries: applyRotaryPosition(
                rope, to: split(queries(x), heads, queryNorm), offset: offset),
            keys: applyRotaryPosition(rope, to: split(keys(x), kvHeads, keyNorm), offset: offset),
            values: split(values(x), kvHeads), cache: cache, scale: scale, mask: mask)
        return output(attended.transposed(0, 2, 1, 3).reshaped(batch, length, -1))
    }
}

final class TransformerMLP: Module {
    @ModuleInfo(key: "gate_proj") var gate: Linear
    @ModuleInfo(key: "up_proj") var up: Linear
    @ModuleInfo(key: "down_proj") var down: Linear

    init(_ configuration: H2OTransformerConfiguration) {
        let (size, wide) = (configuration.hiddenSize, configuration.intermediateSize)
        let bias = configuration.mlpBias
        super.init()
        _gate.wrappedValue = Linear(size, wide, bias: bias)
        _up.wrappedValue = Linear(size, wide, bias: bias)
        _down.wrappedValue = Linear(wide, size, bias: bias)
    }

    func callAsFunction(_ x: MLXArray) -> MLXArray { down(silu(gate(x)) * up(x)) }
}
