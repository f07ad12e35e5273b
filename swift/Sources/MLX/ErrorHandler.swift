import Cmlx
import Foundation
import Synchronization

/// An error that MLX reported inside ``withError(_:)``.
public enum MLXError: LocalizedError, Sendable, Equatable {
    case caught(String)

    public var errorDescription: String? {
        switch self {
        case .caught(let message): "MLX Error: \(message)"
        }
    }
}

/// Keeps the first error reported inside a block.
public final class ErrorBox: Sendable {
    private let first = Mutex<(any Error)?>(nil)

    public var firstError: (any Error)? {
        get { first.withLock { $0 } }
        set { first.withLock { $0 = $0 ?? newValue } }
    }

    /// Throw the first error, if there is one.
    public func check() throws {
        if let firstError { throw firstError }
    }
}

/// Receives errors. A class instead of a closure: optimised code of Swift 6.3 for Linux crashes if
/// the value of a task-local is an optional closure.
private final class Handler: Sendable {
    let tell: @Sendable (String) -> Void

    init(_ tell: @escaping @Sendable (String) -> Void) { self.tell = tell }
}

private enum Handlers {
    @TaskLocal static var current: Handler?

    static let installed: Void = mlx_set_error_handler(
        { message, _ in
            let text = message.map { String(cString: $0) } ?? ""
            // As in mlx-swift, an error that nobody handles is fatal.
            guard let handler = Handlers.current else { fatalError(text) }
            handler.tell(text)
        }, nil, nil)
}

/// Install the handler once, before the first call that can fail.
func initError() {
    _ = Handlers.installed
}

/// Run `body` and pass every error that MLX reports inside it to `handler`.
public func withErrorHandler<R>(
    _ handler: @escaping @Sendable (String) -> Void, _ body: () throws -> R
) rethrows -> R {
    initError()
    return try Handlers.$current.withValue(Handler(handler), operation: body)
}

/// Run `body` and throw the first error that MLX reports inside it, at its end or at
/// ``ErrorBox/check()``. Blocks can be nested; each sees its own errors.
public func withError<R>(_ body: (ErrorBox) throws -> R) throws -> R {
    let box = ErrorBox()
    return try withErrorHandler({ box.firstError = MLXError.caught($0) }) {
        let result = try body(box)
        try box.check()
        return result
    }
}

/// Run `body` and throw the first error that MLX reports inside it, at its end.
public func withError<R>(_ body: () throws -> R) throws -> R {
    try withError { (_: ErrorBox) in try body() }
}
