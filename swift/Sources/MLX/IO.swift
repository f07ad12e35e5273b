import Cmlx
import Foundation

/// A file that cannot be read or written.
public enum LoadSaveError: LocalizedError, Sendable {
    case unknownExtension(String)

    public var errorDescription: String? {
        switch self {
        case .unknownExtension(let name): "Unknown extension '\(name)', expected 'safetensors'"
        }
    }
}

/// The arrays and the metadata of a safetensors file.
public func loadArraysAndMetadata(
    url: URL, stream: StreamOrDevice = .cpu
) throws -> ([String: MLXArray], [String: String]) {
    try requireSafetensors(url)
    var arrays = mlx_map_string_to_array_new()
    var texts = mlx_map_string_to_string_new()
    defer {
        mlx_map_string_to_array_free(arrays)
        mlx_map_string_to_string_free(texts)
    }
    try withError { _ = mlx_load_safetensors(&arrays, &texts, url.path, stream.ctx) }
    return (dictionary(arrays), dictionary(texts))
}

/// The arrays of a safetensors file.
public func loadArrays(url: URL, stream: StreamOrDevice = .cpu) throws -> [String: MLXArray] {
    try loadArraysAndMetadata(url: url, stream: stream).0
}

/// Write a safetensors file; evaluates the arrays.
public func save(
    arrays: [String: MLXArray], metadata: [String: String] = [:], url: URL,
    stream: StreamOrDevice = .default
) throws {
    try requireSafetensors(url)
    let values = mlx_map_string_to_array_new()
    let texts = mlx_map_string_to_string_new()
    defer {
        mlx_map_string_to_array_free(values)
        mlx_map_string_to_string_free(texts)
    }
    for (name, array) in arrays { mlx_map_string_to_array_insert(values, name, array.ctx) }
    for (name, text) in metadata { mlx_map_string_to_string_insert(texts, name, text) }
    try withError { _ = mlx_save_safetensors(url.path, values, texts) }
}

private func requireSafetensors(_ url: URL) throws {
    initError()
    guard url.pathExtension == "safetensors" else {
        throw LoadSaveError.unknownExtension(url.pathExtension)
    }
}

private func dictionary(_ map: mlx_map_string_to_array) -> [String: MLXArray] {
    let iterator = mlx_map_string_to_array_iterator_new(map)
    defer { mlx_map_string_to_array_iterator_free(iterator) }
    var result: [String: MLXArray] = [:]
    while true {
        var key: UnsafePointer<CChar>?
        var borrowed = mlx_array_new()
        guard mlx_map_string_to_array_iterator_next(&key, &borrowed, iterator) == 0, let key else {
            return result
        }
        result[String(cString: key)] = MLXArray(borrowed)
    }
}

private func dictionary(_ map: mlx_map_string_to_string) -> [String: String] {
    let iterator = mlx_map_string_to_string_iterator_new(map)
    defer { mlx_map_string_to_string_iterator_free(iterator) }
    var result: [String: String] = [:]
    while true {
        var key: UnsafePointer<CChar>?
        var value: UnsafePointer<CChar>?
        guard mlx_map_string_to_string_iterator_next(&key, &value, iterator) == 0, let key,
            let value
        else { return result }
        result[String(cString: key)] = String(cString: value)
    }
}
