import Foundation
import MLX
import MLXNN

/// The input of a model.
public struct LMInput {
    public let text: Text

    public struct Text {
        /// [L], or [B, L].
        public let tokens: MLXArray
        public let mask: MLXArray?

        public init(tokens: MLXArray, mask: MLXArray? = nil) {
            self.tokens = tokens
            self.mask = mask
        }
    }

    public init(text: Text) { self.text = text }

    public init(tokens: MLXArray, mask: MLXArray? = nil) {
        self.init(text: Text(tokens: tokens, mask: mask))
    }
}

/// The output of a model.
public struct LMOutput {
    public let logits: MLXArray
    public let state: State?

    /// The state that a model carries from step to step.
    public struct State {
        public init() {}
    }

    public init(logits: MLXArray, state: State? = nil) {
        self.logits = logits
        self.state = state
    }
}

public enum PrepareResult {
    /// Tokens that are still to be read.
    case tokens(LMInput.Text)
    case logits(LMOutput)
}

/// Settings of a generation.
public struct GenerateParameters: Sendable {
    /// Rows that each layer keeps, by age.
    public var maxKVSize: Int?

    public init(maxKVSize: Int? = nil) { self.maxKVSize = maxKVSize }
}

/// A model that loads weights.
public protocol BaseLanguageModel: Module {
    /// The weights of a file under the model's names.
    func sanitize(weights: [String: MLXArray]) -> [String: MLXArray]
}

extension BaseLanguageModel {
    public func sanitize(weights: [String: MLXArray]) -> [String: MLXArray] { weights }
}

/// A model that writes text, as mlx-swift-lm 3.31 declares it.
public protocol LanguageModel: BaseLanguageModel {
    /// Read a prompt, or all but its end.
    func prepare(_ input: LMInput, cache: [KVCache], windowSize: Int?) throws -> PrepareResult

    func callAsFunction(
        _ input: LMInput.Text, cache: [KVCache]?, state: LMOutput.State?
    ) -> LMOutput

    /// Logits [B, L, vocabulary] of tokens [B, L].
    func callAsFunction(_ inputs: MLXArray, cache: [KVCache]?) -> MLXArray

    /// One cache per layer.
    func newCache(parameters: GenerateParameters?) -> [KVCache]
}

extension LanguageModel {
    public func callAsFunction(
        _ input: LMInput.Text, cache: [KVCache]?, state: LMOutput.State?
    ) -> LMOutput {
        LMOutput(logits: callAsFunction(input.tokens, cache: cache))
    }
}

/// A model whose caches need only the number of heads.
public protocol KVCacheDimensionProvider {
    /// Of each layer.
    var kvHeads: [Int] { get }
}

extension LanguageModel where Self: KVCacheDimensionProvider {
    /// The original keeps `maxKVSize` rows by age, if that is set.
    public func newCache(parameters: GenerateParameters?) -> [KVCache] {
        kvHeads.map { _ in KVCacheSimple() }
    }
}

/// A model that takes adapters; the adapters of the original are not part of the Linux build.
public protocol LoRAModel {
    /// The layers whose modules adapters may replace.
    var loraLayers: [Module] { get }
}

/// A model and what belongs to it; the original's processor and tokenizer are not part of the Linux
/// build.
public struct ModelContext {
    public var model: any LanguageModel

    public init(model: any LanguageModel) { self.model = model }
}

/// Makes models from their `config.json`, by the name of their type.
public actor ModelTypeRegistry<T> {
    private var creators: [String: (Data) throws -> T] = [:]

    public init() {}

    public func registerModelType(_ type: String, creator: @escaping (Data) throws -> T) {
        creators[type] = creator
    }

    public func createModel(configuration: Data, modelType: String) throws -> sending T {
        guard let creator = creators[modelType] else {
            throw ModelFactoryError.unsupportedModelType(modelType)
        }
        return try creator(configuration)
    }
}

public enum ModelFactoryError: Error {
    case unsupportedModelType(String)
}
