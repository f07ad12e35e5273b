import Foundation
import MLX
import MLXH2OLM
import MLXNN

/// A model in a directory, as mlx_lm and the hub lay it out.
struct ModelDirectory {
    let url: URL

    /// What of `config.json` is not the model's.
    private struct Settings: Decodable {
        let quantization: [String: JSONValue]?
        let eosTokenID: JSONValue?

        enum CodingKeys: String, CodingKey {
            case quantization
            case eosTokenID = "eos_token_id"
        }
    }

    /// A number, or several; anything else is none.
    private enum JSONValue: Decodable {
        case numbers([Int])

        init(from decoder: any Decoder) throws {
            let value = try decoder.singleValueContainer()
            if let number = try? value.decode(Int.self) {
                self = .numbers([number])
            } else {
                self = .numbers((try? value.decode([Int].self)) ?? [])
            }
        }
    }

    private func file(_ name: String) throws -> Data {
        do {
            return try Data(contentsOf: url.appending(path: name))
        } catch {
            throw Usage(description: "\(url.path) holds no \(name) that can be read")
        }
    }

    /// The model with its weights; on a CPU float16 becomes float32, since arithmetic in float16 is
    /// slow there.
    func load() throws -> H2OTransformer {
        let data = try file("config.json")
        guard try JSONDecoder().decode(Settings.self, from: data).quantization == nil else {
            throw Usage(description: "\(url.path) holds quantised weights, expected floats")
        }
        let model = H2OTransformer(
            try JSONDecoder().decode(H2OTransformerConfiguration.self, from: data))
        var weights: [String: MLXArray] = [:]
        for name in try FileManager.default.contentsOfDirectory(atPath: url.path).sorted()
        where name.hasPrefix("model") && name.hasSuffix(".safetensors") {
            weights.merge(try loadArrays(url: url.appending(path: name))) { $1 }
        }
        let onCPU = Device.defaultDevice().deviceType == .cpu
        let own = model.sanitize(weights: weights).mapValues {
            onCPU && $0.dtype == .float16 ? $0.asType(.float32) : $0
        }
        try model.update(parameters: ModuleParameters.unflattened(own), verify: .all)
        return model
    }

    func tokenizer() throws -> Tokenizer {
        try Tokenizer(file("tokenizer.json"))
    }

    /// Tokens that end a text.
    func endTokens() throws -> Set<Int> {
        let settings = try JSONDecoder().decode(Settings.self, from: file("config.json"))
        guard case .numbers(let tokens) = settings.eosTokenID else { return [] }
        return Set(tokens)
    }
}
