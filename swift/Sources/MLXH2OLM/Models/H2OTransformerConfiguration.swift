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

    private enum Key: String, CodingKey {
        case modelType = "model_type"
        case hiddenSize = "hidden_size"
        case intermediateSize = "intermediate_size"
        case layers = "num_hidden_layers"
        case heads = "num_attention_heads"
        case kvHeads = "num_key_value_heads"
        case headSize = "head_dim"
        case vocabularySize = "vocab_size"
        case normEps = "rms_norm_eps"
        case attentionBias = "attention_bias"
        case mlpBias = "mlp_bias"
        case tiesEmbeddings = "tie_word_embeddings"
        case ropeBase = "rope_theta"
        case ropeTraditional = "rope_traditional"
        case ropeScaling = "rope_scaling"
        case maxPositions = "max_position_embeddings"
    }

    /// - Throws: `H2OError` for another type of model, impossible sizes, or an unsupported rotary
    ///   embedding; `DecodingError` if a value is missing
    public init(from decoder: any Decoder) throws {
        let values = try decoder.container(keyedBy: Key.self)
        modelType = try values.decode(String.self, forKey: .modelType)
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
                    "\(key.rawValue) is \(found.map(String.init) ?? "missing"), expected 1 to "
                        + "\(most).")
            }
            return found
        }
        hiddenSize = try size(.hiddenSize)
        intermediateSize = try size(.intermediateSize)
        layers = try size(.layers)
        heads = try size(.heads)
        kvHeads = try size(.kvHeads, heads)
        headSize = try size(.headSize, hiddenSize / heads, most: Int(Int32.max) / heads)
        vocabularySize = try size(.vocabularySize)
        guard heads % kvHeads == 0 else {
            throw H2OError(
                "H2OTransformer",
                "num_attention_heads is \(heads), expected a multiple of \(kvHeads).")
        }
        func flag(_ key: Key, _ fallback: Bool) throws -> Bool {
            try values.decodeIfPresent(Bool.self, forKey: key) ?? fallback
        }
        normEps = try values.decode(Float.self, forKey: .normEps)
        attentionBias = try flag(.attentionBias, false)
        mlpBias = try flag(.mlpBias, false)
        tiesEmbeddings = try flag(.tiesEmbeddings, modelType == "llama")
        ropeTraditional = try flag(.ropeTraditional, false)
        // The default of the original models.
        let usual: Float = modelType == "qwen3" ? 1_000_000 : 10_000
        ropeBase = try values.decodeIfPresent(Float.self, forKey: .ropeBase) ?? usual
        maxPositions = try values.decodeIfPresent(Int.self, forKey: .maxPositions)
        // Null in many files.
        ropeScaling = try values.decodeIfPresent(
            [String: StringOrNumber].self, forKey: .ropeScaling)
        let kind = ropeScaling.flatMap { $0["type"] ?? $0["rope_type"] } ?? .string("default")
        guard ["default", "linear", "llama3"].contains(where: { kind == .string($0) }) else {
            throw H2OError(
                "H2OTransformer",
                "rope_scaling is of the kind \(kind), expected default, linear or llama3.")
        }
    }
}
