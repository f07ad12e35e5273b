import CMLXH2OSupport
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

    /// From the message of a C call.
    init(reported message: String) {
        description = H2OError.withoutPlace(message)
    }

    public var errorDescription: String? { description }

    /// mlx-c appends " at FILE:LINE" of its own sources.
    private static func withoutPlace(_ message: String) -> String {
        guard let place = message.range(of: " at ", options: .backwards),
            message[place.upperBound...].wholeMatch(of: #/\S+:\d+/#) != nil
        else { return message }
        return String(message[..<place.lowerBound])
    }

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
