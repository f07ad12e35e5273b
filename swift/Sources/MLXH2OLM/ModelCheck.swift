import Foundation
import MLXLMCommon

// Whether the rows of a file are those of a model.

extension PromptCacheFile {
    func check(_ caches: [any KVCache], for model: any LanguageModel) throws {
        let model = (model as? EvictingLanguageModel)?.model ?? model
        let layers = model.newCache(parameters: nil).count
        guard caches.count == layers else {
            throw unfit("holds \(caches.count) layers, expected \(layers) as the model has")
        }
        let own = model as? H2OTransformer
        let heads = (model as? any KVCacheDimensionProvider)?.kvHeads ?? []
        for (layer, cache) in caches.enumerated() {
            let parts: [any KVCache] = (cache as? HeadGroupsKVCache)?.caches ?? [cache]
            let keys = parts.compactMap { ($0 as? H2OKVCache)?.table?.layouts.keys }
            guard let size = keys.first?.size else { continue }
            let found = [keys.reduce(0) { $0 + $1.heads }, size]
            let expected = [layer < heads.count ? heads[layer] : found[0], own?.headSize ?? size]
            guard found == expected else {
                throw unfit(
                    "holds \(found[0]) KV heads of \(found[1]) elements in layer \(layer), expected "
                        + "\(expected[0]) of \(expected[1]) as the model has")
            }
        }
        guard let own else { return }
        try compare("rope_theta", own.configuration.ropeBase)
        try compare("rope_scaling", own.configuration.ropeScaling) { $0?.scaling }
    }

    /// Throws if Python says something else of the file's model.
    private func compare<T: Decodable & Equatable>(
        _ fact: String, _ own: T, _ used: (T) -> T = { $0 }
    ) throws {
        guard let json = facts[fact] else { return }
        let found = try? JSONDecoder().decode(T.self, from: Data(json.utf8))
        guard found.map(used) == own else {
            throw unfit("is of a model with \(fact) = \(json), expected \(own)")
        }
    }
}
