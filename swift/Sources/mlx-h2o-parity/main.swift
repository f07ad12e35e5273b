// Reads a file of parity cases and writes this package's results for them:
//     mlx-h2o-parity [--backend NAME] INPUT.safetensors OUTPUT.safetensors
// A case that fails is listed with its message in the metadata "errors"; the others go on.
import Cmlx
import Foundation
import MLX
import MLXH2O

private struct Usage: Error, CustomStringConvertible {
    let description: String
}

private func text(_ error: any Error) -> String {
    if case MLXError.caught(let message) = error { return message }
    return "\(error)"
}

private func json(_ value: [String: String]) throws -> String {
    let encoder = JSONEncoder()
    encoder.outputFormatting = .sortedKeys
    return String(decoding: try encoder.encode(value), as: UTF8.self)
}

private func versions() -> [String: String] {
    var version = mlx_string_new()
    defer { mlx_string_free(version) }
    mlx_version(&version)
    #if compiler(>=6.4)
    let compiler = "6.4 or later"
    #elseif compiler(>=6.3)
    let compiler = "6.3"
    #else
    let compiler = "6.2"
    #endif
    return ["mlx": String(cString: mlx_string_data(version)), "swift": compiler]
}

private func run(_ parity: Case, _ backend: H2OBackend?) throws -> [String: MLXArray] {
    let operations = [
        "attention": runAttention, "keep": runKeep, "trace": runTrace, "quantized": runQuantized,
        "accumulate": runAccumulate, "append": runAppend, "codes": runCodes,
        "prefill": runPrefill, "attend": runAttend, "fold": runFold, "host": runHostTime,
        "without_scores": runWithoutScores,
    ]
    guard let operation = operations[parity.fields.op] else {
        throw Case.Malformed(description: "op is '\(parity.fields.op)', which is not known here")
    }
    return try withError {
        let results = try withBackend(backend) { try operation(parity) }
        eval(Array(results.values))
        return results
    }
}

private func main(_ arguments: [String]) throws {
    var paths = arguments
    var backend: H2OBackend?
    if let option = paths.firstIndex(of: "--backend") {
        let names = H2OBackend.allCases.map(\.rawValue).joined(separator: ", ")
        guard option + 1 < paths.count, let named = H2OBackend(rawValue: paths[option + 1]) else {
            throw Usage(description: "--backend takes one of: \(names)")
        }
        backend = named
        paths.removeSubrange(option...option + 1)
    }
    guard paths.count == 2 else {
        throw Usage(
            description:
                "usage: mlx-h2o-parity [--backend NAME] INPUT.safetensors OUTPUT.safetensors"
        )
    }
    var results: [String: MLXArray] = [:]
    var errors: [String: String] = [:]
    for parity in try Case.read(URL(fileURLWithPath: paths[0])) {
        do {
            for (part, array) in try run(parity, backend) {
                results["\(parity.name)/\(part)"] = array
            }
        } catch {
            errors[parity.name] = text(error)
        }
    }
    // A file without arrays cannot be written.
    if results.isEmpty { results["none"] = MLXArray.zeros([1], dtype: .int32) }
    try save(
        arrays: results,
        metadata: ["leg": "swift", "versions": json(versions()), "errors": json(errors)],
        url: URL(fileURLWithPath: paths[1]))
}

do {
    try main(Array(CommandLine.arguments.dropFirst()))
} catch {
    FileHandle.standardError.write(Data("mlx-h2o-parity: \(text(error))\n".utf8))
    exit(1)
}
