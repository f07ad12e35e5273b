import Foundation
import MLX
import MLXH2O
import MLXLMCommon

// mlx-swift-lm's savePromptCache writes caches that it does not know as plain ones, which would
// lose the scores, the positions and the settings.

private let format = "mlx-h2o prompt cache 1"

extension H2OKVCache {
    /// Write the caches of a model to a safetensors file; evaluates them.
    ///
    /// - Parameters:
    ///   - caches: one per layer, all of this class or ``QuantizedH2OKVCache``
    ///   - url: a file that ends in .safetensors
    ///   - metadata: texts to be read back by ``load(from:)``
    /// - Throws: `H2OError` where a cache is of another class, or what writing throws
    public static func save(
        _ caches: [any KVCache], to url: URL, metadata: [String: String] = [:]
    ) throws {
        var arrays: [String: MLXArray] = [:]
        var texts = ["format": format, "layers": String(caches.count)]
        for (layer, cache) in caches.enumerated() {
            guard let cache = cache as? H2OKVCache else {
                throw H2OError(
                    "H2OKVCache.save",
                    "layer \(layer) has a \(type(of: cache)), expected an H2OKVCache.")
            }
            try cache.flush()
            for (part, array) in cache.state.enumerated() { arrays["\(layer).\(part)"] = array }
            for (part, text) in cache.metaState.enumerated() { texts["\(layer).\(part)"] = text }
        }
        for (name, text) in metadata { texts["user.\(name)"] = text }
        // A file without arrays cannot be written.
        if arrays.isEmpty { arrays["empty"] = MLXArray.zeros([1], dtype: .int32) }
        try MLX.save(arrays: arrays, metadata: texts, url: url)
    }

    /// The caches, settings included, and the metadata of a file that ``save(_:to:metadata:)``
    /// wrote.
    ///
    /// - Throws: `H2OError` where the file is another one, or what reading throws
    public static func load(from url: URL) throws -> ([H2OKVCache], [String: String]) {
        let (arrays, texts) = try loadArraysAndMetadata(url: url)
        guard texts["format"] == format, let layers = texts["layers"].flatMap({ Int($0) }) else {
            throw H2OError(
                "H2OKVCache.load",
                "\(url.lastPathComponent) says format '\(texts["format"] ?? "")', expected '\(format)'."
            )
        }
        let caches = try (0..<max(0, layers)).map { layer in
            let meta = (0..<5).compactMap { texts["\(layer).\($0)"] }
            let read = H2OKVCache(try H2OConfiguration())
            try read.restore(metaState: meta)
            let cache = evictingCache(read.configuration)
            try cache.restore(metaState: meta)
            let parts = (0..<8).compactMap { arrays["\(layer).\($0)"] }
            cache.table = try RowTable(state: parts, cache.configuration)
            return cache
        }
        let user = texts.compactMap { name, text in
            name.hasPrefix("user.") ? (String(name.dropFirst("user.".count)), text) : nil
        }
        return (caches, Dictionary(uniqueKeysWithValues: user))
    }
}
