import CMLXH2OReport
import Foundation
import MLX

/// A call that cannot be served: which operation, what was found, what was expected.
public struct H2OError: LocalizedError, CustomStringConvertible, Sendable, Equatable {
    /// Begins with the name of the operation in brackets, as MLX's messages do.
    public let description: String

    /// For an operation, by its name without brackets.
    public init(_ operation: String, _ message: String) {
        description = "[\(operation)] \(message)"
    }

    /// From the message of a C call; mlx-c appends " at FILE:LINE" of its own sources.
    init(reported message: String) {
        description = message.replacing(#/ at \S+:\d+$/#, with: "")
    }

    public var errorDescription: String? { description }

    /// Pass `error` to MLX's error handler, for protocol members that cannot throw: `withError`
    /// throws it; without `withError` it is fatal, like every error of MLX.
    public static func report(_ error: any Error) {
        mlx_h2o_swift_report("\(error)")
    }

    /// Run C calls; throws what they report as an ``H2OError``.
    static func catching<R>(_ body: () -> R) throws -> R {
        do {
            return try withError { body() }
        } catch MLXError.caught(let message) {
            throw H2OError(reported: message)
        }
    }
}
