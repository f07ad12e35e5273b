import CMLXH2OSupport
import Foundation
import MLX
import MLXLMCommon
import MLXNN

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
        try compare("fingerprint of weights", own.fingerprint)
        try compare("rope_theta", own.configuration.ropeBase)
        try compare("rope_scaling", own.configuration.ropeScaling) { $0?.scaling }
    }

    /// Throws if Python says something else of the file's model.
    private func compare<T: Decodable & Equatable>(
        _ fact: String, _ own: @autoclosure () -> T, _ used: (T) -> T = { $0 }
    ) throws {
        guard let json = facts[fact] else { return }
        let (own, found) = (own(), try? JSONDecoder().decode(T.self, from: Data(json.utf8)))
        guard found.map(used) == own else {
            throw unfit("is of a model with \(fact) = \(json), expected \(own)")
        }
    }
}

extension H2OTransformer {
    /// As in Python, SHA-256 of the name, shape, kind and at most 16 evenly spread elements of each
    /// weight, in the order of their names; all floats count as float32.
    fileprivate var fingerprint: String {
        var text = Data()
        for (name, array) in parameters().flattened().sorted(by: { $0.0 < $1.0 }) {
            let kind = array.dtype.isFloatingPoint ? "float" : "mlx.core.\(array.dtype)"
            let shape = array.shape.map { "\($0)" }.joined(separator: ", ")
            text += Data("('\(name)', (\(shape)\(array.ndim == 1 ? "," : "")), '\(kind)')".utf8)
            let places = stride(from: 0, to: array.size, by: max(1, array.size / 16)).prefix(16)
            let some = take(array.reshaped(-1), MLXArray(places.map { UInt32($0) }), axis: 0)
            func bytes<T: HasDType>(_ type: T.Type) -> Data {
                some.asArray(type).withUnsafeBytes { Data($0) }
            }
            switch array.dtype {
            case .uint8: text += bytes(UInt8.self)
            case .uint32: text += bytes(UInt32.self)
            default: text += bytes(Float.self)
            }
        }
        var digest = [CChar](repeating: 0, count: 65)
        text.withUnsafeBytes { mlx_h2o_swift_sha256($0.baseAddress, $0.count, &digest) }
        return String(decoding: digest.prefix(32).map { UInt8($0) }, as: UTF8.self)
    }
}
