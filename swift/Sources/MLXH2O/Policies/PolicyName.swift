/// Names of the policies: see docs/design.md. The Python package has more, for comparison.
public enum PolicyName: String, Sendable, Codable, CaseIterable {
    /// ``H2OPolicy``
    case h2o
    /// ``H2OEmaPolicy``
    case h2oEma = "h2o-ema"
    /// ``WindowPolicy``
    case window
    /// ``KeyDiffPolicy``
    case keydiff

    /// The policy of this name, as a command line or a file writes it.
    ///
    /// - Throws: ``H2OError`` for another name
    public init(named name: String) throws {
        guard let found = PolicyName(rawValue: name) else {
            let known = Self.allCases.map(\.rawValue).joined(separator: ", ")
            throw H2OError("H2OConfig", "policy is '\(name)', expected one of: \(known).")
        }
        self = found
    }

    /// Checked as in ``init(named:)``.
    public init(from decoder: any Decoder) throws {
        try self.init(named: decoder.singleValueContainer().decode(String.self))
    }
}

extension H2OConfiguration {
    /// The named policy, with its settings.
    public func makePolicy() -> any EvictionPolicy {
        switch policy.name {
        case .h2o: H2OPolicy(diversity: policy.diversity, folds: policy.folds)
        case .h2oEma: H2OEmaPolicy(decay: policy.decay)
        case .window: WindowPolicy()
        case .keydiff: KeyDiffPolicy()
        }
    }
}
