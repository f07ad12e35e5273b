import Foundation
import MLXH2O
import MLXLMCommon

/// The `config.json` of a Llama or Qwen3 model.
public struct H2OTransformerConfiguration: Decodable, Sendable {
    let modelType: String
    let hiddenSize: Int
    let intermediateSize: Int
    let layers: Int
    let heads: Int
    let kvHeads: Int
    let headSize: Int
    let vocabularySize: Int
    let normEps: Float
    let attentionBias: Bool
    let mlpBias: Bool
    let tiesEmbeddings: Bool
    let ropeBase: Float
    let ropeTraditional: Bool
    let ropeScaling: [String: StringOrNumber]?
    let maxPositions: Int?

    /// The supported values of `model_type`.
    public static let modelTypes = ["llama", "qwen3"]

    /// Whether queries and keys are normalised before the rotary embedding.
    var normalisesHeads: Bool { modelType == "qwen3" }

    private struct Key: CodingKey, ExpressibleByStringLiteral {
        let stringValue: String
        let intValue: Int? = nil

        init(stringLiteral name: String) { stringValue = name }
        init?(stringValue name: String) { stringValue = name }
        init?(intValue: Int) { nil }
    }

    /// - Throws: `H2OError` for another type of model, impossible sizes, or an unsupported rotary
    ///   embedding; `DecodingError` if a value is missing
    public init(from decoder: any Decoder) throws {
        let values = try decoder.container(keyedBy: Key.self)
        modelType = try values.decode(String.self, forKey: "model_type")
        guard Self.modelTypes.contains(modelType) else {
            throw H2OError(
                "H2OTransformer",
                "model_type is '\(modelType)', expected one of \(Self.modelTypes).")
        }
        func size(_ key: Key, _ fallback: Int? = nil, most: Int = Int(Int32.max)) throws -> Int {
            let found = try values.decodeIfPresent(Int.self, forKey: key) ?? fallback
            guard let found, found >= 1, found <= most else {
                throw H2OError(
                    "H2OTransformer",
                    "\(key.stringValue) is \(found.map(String.init) ?? "missing"), expected 1 to "
                        + "\(most).")
            }
            return found
        }
        hiddenSize = try size("hidden_size")
        intermediateSize = try size("intermediate_size")
        layers = try size("num_hidden_layers")
        heads = try size("num_attention_heads")
        kvHeads = try size("num_key_value_heads", heads)
        headSize = try size("head_dim", hiddenSize / heads, most: Int(Int32.max) / heads)
        vocabularySize = try size("vocab_size")
        guard heads % kvHeads == 0 else {
            throw H2OError(
                "H2OTransformer",
                "num_attention_heads is \(heads), expected a multiple of \(kvHeads).")
        }
        func flag(_ key: Key) throws -> Bool? { try values.decodeIfPresent(Bool.self, forKey: key) }
        normEps = try values.decode(Float.self, forKey: "rms_norm_eps")
        attentionBias = try flag("attention_bias") ?? false
        mlpBias = try flag("mlp_bias") ?? false
        tiesEmbeddings = try flag("tie_word_embeddings") ?? (modelType == "llama")
        ropeTraditional = try flag("rope_traditional") ?? false
        // The default of the original models.
        let usual: Float = modelType == "qwen3" ? 1_000_000 : 10_000
        maxPositions = try values.decodeIfPresent(Int.self, forKey: "max_position_embeddings")
        // Null in many files. Files of transformers 5 name both in "rope_parameters".
        let given = try (["rope_parameters", "rope_scaling"] as [Key]).compactMap { key in
            try values.decodeIfPresent([String: StringOrNumber].self, forKey: key)
        }
        let nested = given.first?["rope_theta"]?.asFloat()
        ropeBase = try values.decodeIfPresent(Float.self, forKey: "rope_theta") ?? nested ?? usual
        ropeScaling = given.last?.scaling
        guard let kind = ropeScaling?.kind else { return }
        guard ["linear", "llama3"].contains(where: { kind == .string($0) }) else {
            throw H2OError(
                "H2OTransformer",
                "rope_scaling is of the kind \(kind), expected default, linear or llama3.")
        }
    }
}

extension [String: StringOrNumber] {
    fileprivate var kind: StringOrNumber { self["type"] ?? self["rope_type"] ?? .string("default") }

    /// The same settings of a rotary embedding, or nil if they scale nothing.
    var scaling: Self? { kind == .string("default") ? nil : self }
}
