import Foundation
import MLX
import MLXH2O
import MLXH2OLM
import MLXLMCommon
import MLXNN
import Testing

/// Weights by name, and the context of a model, whose other parts are not part of the Linux build.
@Suite struct ModuleTests {
    private func transformer() throws -> H2OTransformer {
        let config = """
            {"model_type": "qwen3", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 16,
             "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-6}
            """
        return H2OTransformer(
            try JSONDecoder().decode(H2OTransformerConfiguration.self, from: Data(config.utf8)))
    }

    @Test func weightsHaveTheNamesOfFiles() throws {
        let layer = [
            "input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj",
            "post_attention_layernorm", "self_attn.k_norm", "self_attn.k_proj", "self_attn.o_proj",
            "self_attn.q_norm", "self_attn.q_proj", "self_attn.v_proj",
        ].map { "model.layers.0.\($0).weight" }
        let others = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
        let names = try transformer().parameters().flattened().map(\.0)
        #expect(names.sorted() == (layer + others).sorted())
    }

    @Test func weightsThatAreNotTheModelsThrow() throws {
        let model = try transformer()
        let whole = model.parameters().values
        let name = "model.norm.weight"
        func message(_ weights: [String: MLXArray]) throws -> String {
            let error = #expect(throws: UpdateError.self) {
                try model.update(parameters: .unflattened(weights), verify: .all)
            }
            return try #require(error).description
        }
        #expect(try message(whole.filter { $0.key != name }) == "there is no \(name)")
        let more = whole.merging(["more": MLXArray(Float(1))]) { $1 }
        #expect(try message(more) == "the model has no more")
        let wide = whole.merging([name: MLXArray.zeros([9], dtype: .float32)]) { $1 }
        #expect(try message(wide) == "\(name) has shape [9], expected [8]")
        let twos = MLXArray([Float](repeating: 2, count: 8))
        try model.update(parameters: .unflattened([name: twos]), verify: .noUnusedKeys)
        #expect(model.parameters().values[name]?.asArray(Float.self) == twos.asArray(Float.self))
    }

    /// mlx-swift-lm asks the model for them by this protocol.
    @Test func adaptersReachEveryLayer() throws {
        let model: any LanguageModel = try transformer()
        #expect((model as? any LoRAModel)?.loraLayers.count == 1)
    }

    @Test func contextsEvict() throws {
        let settings = try H2OConfiguration(.init(8), policy: .h2oEma)
        let context = try evicting(
            ModelContext(model: transformer()), configuration: settings)
        let caches = context.model.newCache(parameters: nil).compactMap { $0 as? H2OKVCache }
        #expect(caches.map(\.configuration) == [settings])
        let error = #expect(throws: MLXError.self) {
            try withError { context.model(MLXArray([Int32(1)], [1, 1]), cache: []) }
        }
        #expect(
            "\(String(describing: error))".contains("found 0 caches, expected one for each of 1"))
    }
}
