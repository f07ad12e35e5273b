import MLX

/// A part of a model: it holds arrays and other modules, under the names that its weights have in a
/// file.
///
/// The part of mlx-swift's class of the same name that models of MLXH2OLM use. Names are those of
/// the stored properties, or the `key` of ``ModuleInfo``.
open class Module: Evaluatable {
    public init() {}

    public func innerState() -> [MLXArray] { Array(parameters().values.values) }

    /// All arrays, by names such as "layers.0.mlp.up_proj.weight".
    open func parameters() -> ModuleParameters {
        var found: [String: MLXArray] = [:]
        collect(self, "", &found)
        return ModuleParameters(values: found)
    }

    public struct VerifyUpdate: OptionSet, Sendable {
        public let rawValue: Int
        public init(rawValue: Int) { self.rawValue = rawValue }

        public static let noUnusedKeys = VerifyUpdate(rawValue: 1 << 0)
        public static let allModelKeysSet = VerifyUpdate(rawValue: 1 << 1)
        public static let shapeMismatch = VerifyUpdate(rawValue: 1 << 2)
        public static let all = VerifyUpdate(rawValue: -1)
        public static let none = VerifyUpdate([])
    }

    /// Replace arrays by others of the same names.
    ///
    /// - Throws: ``UpdateError`` if a check in `verify` fails
    @discardableResult
    open func update(parameters: ModuleParameters, verify: VerifyUpdate) throws -> Self {
        let own = self.parameters().values
        let unused = Set(parameters.values.keys).subtracting(own.keys).sorted()
        if verify.contains(.noUnusedKeys), !unused.isEmpty {
            throw UpdateError.unhandledKeys(unused)
        }
        for (name, array) in own {
            guard let new = parameters.values[name] else {
                if verify.contains(.allModelKeysSet) { throw UpdateError.keyNotFound(name) }
                continue
            }
            if verify.contains(.shapeMismatch), new.shape != array.shape {
                throw UpdateError.mismatchedSize(name, expected: array.shape, found: new.shape)
            }
            array.become(new)
        }
        return self
    }

    open func train(_ mode: Bool = true) {}
}

/// Arrays of a module by their names.
public struct ModuleParameters {
    /// By names with a dot for each level.
    public let values: [String: MLXArray]

    public static func unflattened(_ values: [String: MLXArray]) -> ModuleParameters {
        ModuleParameters(values: values)
    }

    public func flattened() -> [(String, MLXArray)] { values.map { ($0, $1) } }
}

/// Weights that do not match those of the module.
public enum UpdateError: Error, CustomStringConvertible {
    case unhandledKeys([String])
    case keyNotFound(String)
    case mismatchedSize(String, expected: [Int], found: [Int])

    public var description: String {
        switch self {
        case .unhandledKeys(let names): "the model has no \(names.joined(separator: ", "))"
        case .keyNotFound(let name): "there is no \(name)"
        case .mismatchedSize(let name, let expected, let found):
            "\(name) has shape \(found), expected \(expected)"
        }
    }
}

/// A module inside another module, and its name there.
@propertyWrapper public final class ModuleInfo<T>: NamedModule {
    private var module: T?
    let key: String?

    public init(key: String? = nil) { self.key = key }

    public init(wrappedValue: T, key: String? = nil) {
        module = wrappedValue
        self.key = key
    }

    public var wrappedValue: T {
        get {
            // For an optional T, nil is a value.
            guard let module = module ?? Optional<Any>.none as? T else {
                fatalError("\(key ?? "a module") was read before it was set")
            }
            return module
        }
        set { module = newValue }
    }

    var content: Any? { module }
}

private protocol NamedModule {
    var key: String? { get }
    var content: Any? { get }
}

/// The arrays of `value`, whose name is `path`.
private func collect(_ value: Any, _ path: String, _ found: inout [String: MLXArray]) {
    switch value {
    case let array as MLXArray: found[path] = array
    case let modules as [Module]:
        for (index, module) in modules.enumerated() { collect(module, "\(path).\(index)", &found) }
    case let module as Module:
        var mirror: Mirror? = Mirror(reflecting: module)
        while let level = mirror {
            for child in level.children {
                guard let label = child.label else { continue }
                let info = child.value as? any NamedModule
                let name = info.map { $0.key ?? String(label.dropFirst()) } ?? label
                collect(
                    info?.content ?? child.value, path.isEmpty ? name : "\(path).\(name)", &found)
            }
            mirror = level.superclassMirror
        }
    default: break
    }
}
