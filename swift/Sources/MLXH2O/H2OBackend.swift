import CMLXH2O
import Cmlx

/// The implementations of this module's operations.
///
/// All give the same results within the tolerances of docs/python.md. By default, the best one that
/// can serve a call runs; a named one serves the call or throws.
public enum H2OBackend: String, Sendable, CaseIterable {
    /// The Metal kernels, on an Apple GPU.
    case metal
    /// The same kernels on CUDA; no build of this package has them.
    case cuda
    /// Vectorised code for the CPU; part of the Linux build.
    case native
    /// Plain MLX operations, on every device. They define the results.
    case composed

    /// Whether a back end is part of this build and can run here, and why not.
    public struct Status: Sendable, Equatable {
        /// Whether calls may name it.
        public let isAvailable: Bool
        /// Empty if it is available.
        public let reason: String
    }

    /// Looked up each time; never throws.
    public var status: Status {
        var (available, reason) = (false, mlx_string_new())
        defer { mlx_string_free(reason) }
        do {
            let text = try H2OError.catching {
                mlx_h2o_backend_status(rawValue, &available, &reason)
                return mlx_string_data(reason).map { String(cString: $0) } ?? ""
            }
            return Status(isAvailable: available, reason: available ? "" : text)
        } catch {
            return Status(isAvailable: false, reason: "\(error)")
        }
    }

    @TaskLocal static var current: H2OBackend?

    /// The back end of all calls in this task, passed to C, which keeps its choice per thread.
    static func applyCurrent() {
        mlx_h2o_set_backend(current?.rawValue ?? "")
    }
}

/// Name the back end of all calls in `body`, in this task and its children.
///
/// - Parameters:
///   - backend: nil returns to the automatic choice
///   - body: the calls
/// - Throws: ``H2OError`` if the back end is not available, and errors of `body`; calls in `body`
///   throw if the named back end cannot serve them.
public func withBackend<R>(_ backend: H2OBackend?, _ body: () throws -> R) throws -> R {
    if let backend {
        let status = backend.status
        guard status.isAvailable else {
            let found = "back end '\(backend.rawValue)' is not available: \(status.reason)"
            throw H2OError("withBackend", found)
        }
    }
    return try H2OBackend.$current.withValue(backend, operation: body)
}
