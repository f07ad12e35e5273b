import Foundation
import MLX
import MLXH2O
import MLXLMCommon

// Files have mlx_lm's layout: for each layer the parts of a cache by number ("3.0" is the keys of
// layer 3), and in the metadata the user's texts (0), the classes (1), and the parts that were not
// arrays (2). docs/python.md lists the parts; `mlx_h2o.save_prompt_cache` writes the same.

private typealias Groups = PromptCacheFile.Groups

extension H2OKVCache {
    /// Write the caches of a model to a safetensors file, which Python can read; evaluates them. A
    /// new file is written and then renamed, so that an interruption leaves the old file.
    ///
    /// - Parameters:
    ///   - caches: one per layer: this class, ``QuantizedH2OKVCache`` or ``HeadGroupsKVCache``
    ///   - url: a file that ends in .safetensors
    ///   - metadata: texts that ``load(from:for:)`` returns, by names without dots
    /// - Throws: `H2OError` if there are no caches, or for a cache of another class or a bad name;
    ///   errors of writing
    public static func save(
        _ caches: [any KVCache], to url: URL, metadata: [String: String] = [:]
    ) throws {
        guard !caches.isEmpty else {
            throw H2OError("H2OKVCache.save", "found no caches, expected one per layer.")
        }
        guard url.pathExtension == "safetensors" else {
            throw H2OError(
                "H2OKVCache.save",
                "the file is \(url.lastPathComponent), expected a name that ends in .safetensors.")
        }
        var file = PromptCacheFile()
        for (layer, cache) in caches.enumerated() {
            let groups = cache as? HeadGroupsKVCache
            let own = groups?.caches ?? [cache].compactMap { $0 as? H2OKVCache }
            guard !own.isEmpty else {
                throw H2OError(
                    "H2OKVCache.save",
                    "layer \(layer) has a \(type(of: cache)), expected an H2OKVCache.")
            }
            let classes = own.map { "\(type(of: $0))" }
            file.classes.append(groups == nil ? classes[0] : Groups.name)
            if let groups {
                try file.set("\(layer)", 0, json: Groups(heads: groups.heads, classes: classes))
            }
            for (index, one) in own.enumerated() {
                try one.write(to: &file, groups == nil ? "\(layer)" : "\(layer).\(index + 1)")
            }
        }
        try file.write(to: url, metadata)
    }

    /// The caches, with their settings, and the metadata of a file from ``save(_:to:metadata:)`` or
    /// Python: each an `H2OKVCache` or a ``HeadGroupsKVCache``.
    ///
    /// - Parameters:
    ///   - url: the file
    ///   - model: the model to use the caches with. A file of other layers, KV heads or sizes of
    ///     heads is refused; with an ``H2OTransformer`` also one that Python saved with another
    ///     rotary embedding. Neither weights nor the checksum are compared
    /// - Throws: `H2OError` if the file is not a prompt cache, of a later format, damaged, of
    ///   another model, or has unknown settings; errors of reading
    public static func load(
        from url: URL, for model: (any LanguageModel)? = nil
    ) throws -> (caches: [any KVCache], metadata: [String: String]) {
        let file = try PromptCacheFile(contentsOf: url)
        func read(_ place: String, _ name: String) throws -> H2OKVCache {
            guard ["\(H2OKVCache.self)", "\(QuantizedH2OKVCache.self)"].contains(name) else {
                throw file.unfit("layer \(place) is a \(name), expected an H2OKVCache")
            }
            let settings: StoredSettings = try file.json(place, 8, "settings")
            let cache = evictingCache(settings.configuration, name: try file.text(place, 7))
            guard name == "\(type(of: cache))" else {
                throw file.unfit("layer \(place) is a \(name), expected a \(type(of: cache))")
            }
            try cache.read(file, place, settings)
            return cache
        }
        let caches: [any KVCache] = try file.classes.enumerated().map { layer, name in
            guard name == Groups.name else { return try read("\(layer)", name) }
            let found: Groups = try file.json("\(layer)", 0, "groups of KV heads")
            let caches = try found.classes.enumerated().map { try read("\(layer).\($0 + 1)", $1) }
            return try HeadGroupsKVCache(caches, heads: found.heads)
        }
        if let model { try file.check(caches, for: model) }
        return (caches, file.metadata)
    }

    private func write(to file: inout PromptCacheFile, _ layer: String) throws {
        guard ownPolicy == nil else {
            throw H2OError(
                "H2OKVCache.save",
                "layer \(layer) evicts by \(policyName), expected a policy that has a name.")
        }
        try flush()
        for (part, arrays) in (table?.parts ?? [[], [], [], []]).enumerated() {
            if arrays.isEmpty { file.setNone(layer, part) }
            for (index, array) in arrays.enumerated() {
                let name = "\(layer).\(part)" + (arrays.count == 1 ? "" : ".\(index)")
                file.arrays[name] = array
            }
        }
        file.set(layer, 4, MLXArray(Int32(offset)), "scalar")
        file.set(layer, 5, MLXArray(Int32(evicted)), "scalar")
        file.set(layer, 6, MLXArray(isUnscored), "scalar")
        file.set(layer, 7, name)
        try file.set(layer, 8, json: StoredSettings(configuration, table))
        guard reach > 0 else { return }
        let waiting = table?.waiting ?? []
        if waiting.isEmpty {
            file.setNone(layer, 9)
        } else {
            file.arrays["\(layer).9"] = concatenated(waiting.map(\.byQuery), axis: 2)
        }
        file.set(
            layer, 10, "[\(waiting.map { "[\($0.start), \($0.count)]" }.joined(separator: ", "))]")
    }

    private func read(
        _ file: PromptCacheFile, _ layer: String, _ settings: StoredSettings
    ) throws {
        func unfit(_ problem: String) -> H2OError { file.unfit("layer \(layer) \(problem)") }
        let rows = (0..<4).flatMap { file.rows(layer, $0) }
        let dtype = [DType.float16, .bfloat16].first { "\($0)" == settings.dtype } ?? .float32
        let table = try RowTable(
            state: rows, configuration.format, dtype: dtype, valueSize: settings.valueSize)
        let offset = try file.number(layer, 4)
        let evicted = try file.number(layer, 5)
        let count = table?.length ?? 0
        guard (0...Int(Int32.max)).contains(offset), evicted >= 0, offset - evicted == count else {
            throw unfit("has seen \(offset) tokens and evicted \(evicted), and holds \(count) rows")
        }
        guard (table?.lastPosition ?? -1) < offset else {
            throw unfit("has positions that are not \(count) of \(offset) tokens")
        }
        (self.table, self.offset) = (table, offset)
        self.table?.findCertain(of: offset)
        isUnscored = try file.number(layer, 6) != 0
        if reach > 0, let seen = file.rows(layer, 9).first {
            try readWaiting(seen, file.text(layer, 10), unfit)
        }
    }

    private func readWaiting(
        _ seen: MLXArray, _ numbers: String, _ unfit: (String) -> H2OError
    ) throws {
        let shape = seen.shape
        guard let found = try? JSONDecoder().decode([[Int]].self, from: Data(numbers.utf8)),
            let heads = table?.positions.shape,
            found.allSatisfy({ $0.count == 2 && $0[0] >= 0 && $0[1] > 0 }),
            found.allSatisfy({ $0[1] <= offset - $0[0] }), shape.count == 4, shape[0] == heads[0],
            shape[1] > 0, shape[1] % heads[1] == 0, shape[2] == found.reduce(0, { $0 + $1[1] }),
            shape[3] == heads[2], seen.dtype == .float32
        else { throw unfit("has scores of newest queries that do not fit its rows: \(numbers)") }
        var first = 0
        for pair in found {
            table?.waiting.append(
                Waiting(
                    start: pair[0], byQuery: seen[0..., 0..., first..<first + pair[1]],
                    heads: heads[1], unseen: policy.unseen))
            first += pair[1]
        }
    }
}

/// The settings, and what stored rows do not record: the dtype of coded rows, and in files of
/// earlier versions the original size of padded values.
private struct StoredSettings: Codable {
    let configuration: H2OConfiguration
    let dtype: String?
    var valueSize: Int?

    private enum CodingKeys: String, CodingKey {
        case dtype
        case valueSize = "value_size"
    }

    init(_ configuration: H2OConfiguration, _ table: RowTable?) {
        self.configuration = configuration
        let packing = table?.tail.values.packing
        dtype = if case .codes(_, _, let dtype) = packing { "\(dtype)" } else { nil }
    }

    init(from decoder: any Decoder) throws {
        configuration = try H2OConfiguration(from: decoder)
        let more = try decoder.container(keyedBy: CodingKeys.self)
        dtype = try more.decodeIfPresent(String.self, forKey: .dtype)
        valueSize = try more.decodeIfPresent(Int.self, forKey: .valueSize)
    }

    func encode(to encoder: any Encoder) throws {
        try configuration.encode(to: encoder)
        var more = encoder.container(keyedBy: CodingKeys.self)
        try more.encodeIfPresent(dtype, forKey: .dtype)
    }
}
