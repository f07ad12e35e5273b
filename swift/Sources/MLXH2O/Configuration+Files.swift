// Settings in files, under their Python names.

extension H2OConfiguration: Codable {
    /// Settings of Python, or of earlier versions, that Swift does not have, and their neutral
    /// values.
    private static let unserved = [
        "light_bits": ["null"], "kv_handed": ["'packed'"], "unequal_budgets": ["true", "false"],
        "turbo_guard": ["0"], "shared_heads": ["false"],
        // Of coded rows, which do not record it.
        "dtype": ["'float32'", "'float16'", "'bfloat16'"],
    ]

    /// The known settings, and those that Python saves for stored rows and unnamed policies.
    private static let served = Set(
        Budget.CodingKeys.allCases.map(\.rawValue) + Format.CodingKeys.allCases.map(\.rawValue)
            + Policy.CodingKeys.allCases.map(\.rawValue) + ["value_size", "random_seed"])

    /// A value as messages show it.
    private struct Shown: Decodable {
        let text: String

        init(from decoder: any Decoder) throws {
            let value = try decoder.singleValueContainer()
            let flag = (try? value.decode(Bool.self)).map { "\($0)" }
            let number = (try? value.decode(Double.self)).map { number in
                Int(exactly: number).map(String.init) ?? "\(number)"
            }
            let word = (try? value.decode(String.self)).map { "'\($0)'" }
            text = value.decodeNil() ? "null" : flag ?? number ?? word ?? "a list"
        }
    }

    /// Reads settings under their Python names. Checks them like the other initialisers; refuses
    /// Python settings that Swift does not support, by name.
    public init(from decoder: any Decoder) throws {
        for (name, value) in try [String: Shown](from: decoder).sorted(by: { $0.key < $1.key })
        where !Self.served.contains(name) {
            guard let same = Self.unserved[name] else {
                throw failure("\(name) is \(value.text), expected settings that are known here.")
            }
            guard same.contains(value.text) else {
                throw failure(
                    "\(name) is \(value.text), expected \(same[0]): that is not served in Swift.")
            }
        }
        try self.init(Budget(from: decoder), Format(from: decoder), policy: Policy(from: decoder))
    }

    /// All settings under their Python names, in one container.
    public func encode(to encoder: any Encoder) throws {
        try budget.encode(to: encoder)
        if maxKVSize == nil {  // without the name, it would mean the default
            var values = encoder.container(keyedBy: Budget.CodingKeys.self)
            try values.encodeNil(forKey: .maxKVSize)
        }
        try format.encode(to: encoder)
        try policy.encode(to: encoder)
    }
}

extension H2OConfiguration.Format {
    init(from decoder: any Decoder) throws {
        let values = try decoder.container(keyedBy: CodingKeys.self)
        self = try .named(
            kvBits: values.decodeIfPresent(Int.self, forKey: .kvBits),
            valueBits: values.decodeIfPresent(Int.self, forKey: .valueBits),
            denseSize: values.decodeIfPresent(Int.self, forKey: .denseSize) ?? 0,
            isFramed: values.decodeIfPresent(Bool.self, forKey: .kvFrame) ?? false,
            groupSize: values.decodeIfPresent(Int.self, forKey: .kvGroupSize) ?? 64,
            kvFormat: values.decodeIfPresent(String.self, forKey: .kvFormat))
        sparseV = try values.decodeIfPresent(Float.self, forKey: .sparseV) ?? 0
    }
}

extension H2OConfiguration.Policy {
    init(from decoder: any Decoder) throws {
        let values = try decoder.container(keyedBy: CodingKeys.self)
        let name = try values.decode(PolicyName.self, forKey: .name)
        let diversity = try values.decodeIfPresent(Double.self, forKey: .diversity)
        // In files from before `diversity`, "h2o" is the moving average.
        self.init(
            diversity == nil && name == .h2o ? .h2oEma : name, diversity: diversity ?? 0.5,
            decay: try values.decode(Double.self, forKey: .decay),
            folds: try values.decodeIfPresent(Bool.self, forKey: .fold) ?? true)
    }
}
