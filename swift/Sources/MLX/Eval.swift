import Cmlx

/// An object made of arrays that can be evaluated.
public protocol Evaluatable {
    /// The arrays inside it.
    func innerState() -> [MLXArray]
}

extension MLXArray: Evaluatable {
    public func innerState() -> [MLXArray] { [self] }
}

extension [MLXArray]: Evaluatable {
    public func innerState() -> [MLXArray] { self }
}

public func eval(_ arrays: some Collection<MLXArray>) {
    withVector(arrays) { _ = mlx_eval($0) }
}

public func eval(_ arrays: MLXArray...) {
    eval(arrays)
}

/// Start the evaluation and return; reading values waits for it.
public func asyncEval(_ arrays: some Collection<MLXArray>) {
    withVector(arrays) { _ = mlx_async_eval($0) }
}
