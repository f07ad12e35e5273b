/// Settings of an evicting cache, checked once, when they are made.
///
/// Afterwards `sinkSize + heavySize + recentSize == maxKVSize` always holds.
public struct H2OConfiguration: Sendable, Hashable {
    /// Rows that each KV head keeps.
    public private(set) var maxKVSize: Int
    /// Positions below it are never evicted.
    public let sinkSize: Int
    /// Rows kept by score.
    public private(set) var heavySize: Int
    /// The newest rows, never evicted.
    public private(set) var recentSize: Int
    /// Ranks the rows.
    public let policy: PolicyName
    /// Of the policy `h2o`: the share of the rows kept by rank that are kept for the diversity of
    /// their keys, 0 to 1.
    public let diversity: Double
    /// `a` of the moving average `C = a*C + (1-a)*|s|`.
    public let decay: Double
    /// Rows of each head that leave a full cache together, so that a step in so many evicts. Never
    /// more than `maxKVSize` rows are kept; with 1 a row goes for each that comes.
    public private(set) var evictEvery: Int
    /// Tokens that a draft model may propose at a time. The last `speculative + 1` rows are then never
    /// evicted, and can be taken back without a trace.
    public let speculative: Int
    /// Bits of each element of the keys, and of the values unless ``valueBits`` differ: 2, 3, 4, 5, 6
    /// or 8. Nil: rows stay as they come.
    public private(set) var kvBits: Int?
    /// Bits of the values; nil: ``kvBits``.
    public let valueBits: Int?
    /// Whether rows of ``kvBits`` are kept relative to the centre of the first keys of their head,
    /// and rotated.
    public var kvFrame: Bool { framing ?? false }
    /// Nil where no rows are in a frame, as in files of versions that knew of none.
    private var framing: Bool?
    /// Elements that share a scale and a bias: 32, 64 or 128. Rows whose size it does not divide
    /// take 32.
    public let kvGroupSize: Int
    /// In the place of ``kvBits``: rows as codes of rotated directions.
    public private(set) var kvFormat: KVFormat?
    /// Tokens that the model was trained for: rows further back than so many from the newest token
    /// are the first to go, sinks excepted. Nil: `evictingCaches(for:configuration:policy:budgets:)` takes
    /// what an `H2OTransformer` says; in other caches, and with 0, only the policy decides.
    public private(set) var contextSize: Int?

    /// Published splits of the budget (AtomGradient 2026, section 4.1): of 256 rows 4 are sinks and
    /// 128, 64 or 32 are kept by score. The sinks do not scale with the budget; the recent window
    /// takes what is left.
    public enum Preset: String, Sendable, CaseIterable {
        case heavy
        case balanced
        case recent

        func heavySize(of maxKVSize: Int) -> Int {
            switch self {
            case .heavy: maxKVSize / 2
            case .balanced: maxKVSize / 4
            case .recent: maxKVSize / 8
            }
        }
    }

    /// - Parameters:
    ///   - maxKVSize: rows that each KV head keeps, at least 1
    ///   - sinkSize: the first positions, which stay; fewer than `maxKVSize`
    ///   - heavySize: rows kept by score; nil: half of the budget, or what the other two leave; for
    ///     the policy `h2o` all but the recent rows, a quarter of the budget, at least 32 of them
    ///     and at most half
    ///   - recentSize: the newest rows, which stay; nil, or where the three do not fill the budget:
    ///     what the other two leave
    ///   - policy: ranks the rows
    ///   - diversity: of the policy `h2o`, 0 to 1
    ///   - decay: of the policy `h2o-ema`, at least 0, below 1
    ///   - evictEvery: rows that leave a full cache together, at least 1; no more go than are not
    ///     protected; nil: one row of 32, as measured
    ///   - speculative: tokens that a draft model may propose at a time, which count in the budget
    ///   - kvBits: bits of quantised rows; nil: rows stay as they come
    ///   - valueBits: bits of quantised values, where they differ from those of the keys
    ///   - kvFrame: whether rows of `kvBits` are kept relative to the centre of the first keys of
    ///     their head, and rotated
    ///   - kvGroupSize: elements that share a scale and a bias: 32, 64 or 128
    ///   - kvFormat: rows as codes of rotated directions; not with `kvBits`
    ///   - contextSize: rows further back than so many tokens go first; 0: they do not; nil: as the
    ///     model says, if it does
    /// - Throws: ``H2OError`` where a value is out of range or the sizes exceed the budget
    public init(
        maxKVSize: Int = 256, sinkSize: Int = 4, heavySize: Int? = nil, recentSize: Int? = nil,
        policy: PolicyName = .keydiff, diversity: Double = 0.5, decay: Double = 0.95,
        evictEvery: Int? = nil, speculative: Int = 0, kvBits: Int? = nil, valueBits: Int? = nil,
        kvFrame: Bool = true, kvGroupSize: Int = 64, kvFormat: KVFormat? = nil,
        contextSize: Int? = nil
    ) throws {
        try require("maxKVSize", maxKVSize, atLeast: 1)
        try require("sinkSize", sinkSize, atLeast: 0)
        try require("contextSize", contextSize ?? 0, atLeast: 0)
        try require("evictEvery", evictEvery ?? 1, atLeast: 1)
        try require("speculative", speculative, atLeast: 0)
        try require("heavySize", heavySize ?? 0, atLeast: 0)
        try require("recentSize", recentSize ?? 0, atLeast: 0)
        guard decay >= 0, decay < 1 else {
            throw failure("decay is \(decay), expected a number of at least 0, below 1.")
        }
        guard diversity >= 0, diversity <= 1 else {
            throw failure("diversity is \(diversity), expected a number from 0 to 1.")
        }
        try requireKnown("kvBits", kvBits, among: [2, 3, 4, 5, 6, 8])
        try requireKnown("valueBits", valueBits, among: [2, 3, 4, 5, 6, 8])
        try requireKnown("kvGroupSize", kvGroupSize, among: [32, 64, 128])
        if let valueBits, kvBits == nil {
            throw failure("valueBits is \(valueBits) and kvBits is nil, expected kvBits too.")
        }
        if let kvFormat, let kvBits {
            throw failure(
                "kvFormat is '\(kvFormat.rawValue)' and kvBits \(kvBits), expected one of them.")
        }
        guard sinkSize < maxKVSize else {
            throw failure(
                "sinkSize is \(sinkSize), expected fewer than maxKVSize = \(maxKVSize): "
                    + "no row could ever be evicted.")
        }
        self.maxKVSize = maxKVSize
        self.sinkSize = sinkSize
        self.policy = policy
        self.diversity = diversity
        self.decay = decay
        self.evictEvery = evictEvery ?? max(1, maxKVSize / 32)
        self.speculative = speculative
        self.kvBits = kvBits
        self.valueBits = valueBits
        framing = kvBits != nil && kvFrame ? true : nil
        self.kvGroupSize = kvGroupSize
        self.kvFormat = kvFormat
        self.contextSize = contextSize
        self.heavySize = try Self.heavySize(
            of: maxKVSize, sink: sinkSize, heavy: heavySize, recent: recentSize, policy: policy)
        self.recentSize = maxKVSize - sinkSize - self.heavySize
        guard speculative == 0 || maxKVSize >= sinkSize + speculative + 2 else {
            throw failure(
                "maxKVSize is \(maxKVSize) and speculative \(speculative), expected at least "
                    + "sinkSize + speculative + 2 = \(sinkSize + speculative + 2) rows.")
        }
    }

    /// What was published: the policy `h2o-ema`, and a split scaled to `maxKVSize`. The other arguments,
    /// and the errors:
    /// ``init(maxKVSize:sinkSize:heavySize:recentSize:policy:diversity:decay:evictEvery:speculative:kvBits:valueBits:kvFrame:kvGroupSize:kvFormat:contextSize:)``.
    public init(
        preset: Preset, maxKVSize: Int = 256, sinkSize: Int = 4, recentSize: Int? = nil,
        policy: PolicyName = .h2oEma, diversity: Double = 0.5, decay: Double = 0.95,
        evictEvery: Int? = nil, speculative: Int = 0, kvBits: Int? = nil, valueBits: Int? = nil,
        kvFrame: Bool = true, kvGroupSize: Int = 64, kvFormat: KVFormat? = nil,
        contextSize: Int? = nil
    ) throws {
        try require("maxKVSize", maxKVSize, atLeast: 1)
        try require("sinkSize", sinkSize, atLeast: 0)
        // At least one recent row, which gives the newest row time to be scored.
        let heavySize = max(0, min(preset.heavySize(of: maxKVSize), maxKVSize - sinkSize - 1))
        try self.init(
            maxKVSize: maxKVSize, sinkSize: sinkSize, heavySize: heavySize,
            recentSize: recentSize, policy: policy, diversity: diversity, decay: decay,
            evictEvery: evictEvery, speculative: speculative, kvBits: kvBits,
            valueBits: valueBits, kvFrame: kvFrame, kvGroupSize: kvGroupSize, kvFormat: kvFormat,
            contextSize: contextSize)
    }

    private static func heavySize(
        of maxKVSize: Int, sink: Int, heavy: Int?, recent: Int?, policy: PolicyName
    ) throws -> Int {
        let left = maxKVSize - sink - (recent ?? 0)
        // At least one recent row, which gives the newest row time to be scored.
        let spare = recent == nil ? left - 1 : left
        var usual = Preset.heavy.heavySize(of: maxKVSize)
        if let rows = policy.recentRows(of: maxKVSize) {
            usual = recent == nil ? left - rows : left
        }
        let size = heavy ?? max(0, min(usual, spare))
        guard size <= left else {
            throw failure(
                "sinkSize + heavySize + recentSize is \(sink) + \(size) + \(recent ?? 0), "
                    + "expected at most maxKVSize = \(maxKVSize).")
        }
        return size
    }
}

extension H2OConfiguration {
    /// The same with rows quantised to 8 bits, in the place of ``kvFormat`` too.
    public var with8Bits: H2OConfiguration {
        var found = self
        found.kvBits = 8
        found.framing = true
        found.kvFormat = nil
        return found
    }

    /// The same for a model that was trained for so many tokens, where ``contextSize`` is nil.
    public func forModel(contextSize: Int?) -> H2OConfiguration {
        var found = self
        found.contextSize = self.contextSize ?? contextSize.map { max(0, $0) }
        return found
    }

    /// The same with another budget: what was not chosen follows it, else the share of heavy rows
    /// stays, and so does an ``evictEvery`` of one row of 32.
    ///
    /// - Throws: ``H2OError`` where the budget does not suit the other sizes
    public func with(maxKVSize rows: Int) throws -> H2OConfiguration {
        try require("maxKVSize", rows, atLeast: 1)
        let usual = try Self.heavySize(
            of: maxKVSize, sink: sinkSize, heavy: nil, recent: nil, policy: policy)
        let share = max(0, min(heavySize * rows / maxKVSize, rows - sinkSize - 1))
        let sizes = try H2OConfiguration(
            maxKVSize: rows, sinkSize: sinkSize, heavySize: heavySize == usual ? nil : share,
            policy: policy, speculative: speculative)
        var found = self
        if evictEvery == max(1, maxKVSize / 32) { found.evictEvery = sizes.evictEvery }
        found.maxKVSize = rows
        found.heavySize = sizes.heavySize
        found.recentSize = sizes.recentSize
        return found
    }
}

private func failure(_ message: String) -> H2OError {
    H2OError("H2OConfiguration", message)
}

/// Sizes count rows and tokens, whose positions are int32.
private func require(
    _ name: String, _ value: Int, atLeast least: Int, atMost most: Int = Int(Int32.max)
) throws {
    guard value >= least else {
        throw failure("\(name) is \(value), expected at least \(least).")
    }
    guard value <= most else {
        throw failure("\(name) is \(value), expected at most \(most).")
    }
}

private func requireKnown(_ name: String, _ value: Int?, among known: [Int]) throws {
    guard let value, !known.contains(value) else { return }
    throw failure("\(name) is \(value), expected one of \(known).")
}

extension H2OConfiguration: Codable {
    private enum CodingKeys: String, CodingKey {
        case maxKVSize = "max_kv_size"
        case sinkSize = "sink_size"
        case heavySize = "heavy_size"
        case recentSize = "recent_size"
        case policy
        case diversity
        case decay
        case evictEvery = "evict_every"
        case speculative
        case kvBits = "kv_bits"
        case valueBits = "v_bits"
        case framing = "kv_frame"
        case kvGroupSize = "kv_group_size"
        case kvFormat = "kv_format"
        case contextSize = "context_size"
    }

    /// Settings of Python, or of earlier versions, that are not known here, and their values that
    /// change nothing.
    private static let unserved: [String: [Value]] = [
        "light_bits": [.nothing], "dense_size": [.nothing, .number(0)],
        "kv_handed": [.text("packed")], "sparse_v": [.number(0)],
        "unequal_budgets": [.flag(true), .flag(false)], "turbo_guard": [.number(0)],
        "shared_heads": [.flag(false)], "rows_at": [.nothing],
        // Of rows that are stored as codes, which do not say it.
        "dtype": [.text("float32"), .text("float16"), .text("bfloat16")],
    ]

    /// What Python says of stored rows, and of a policy that is not known here.
    private static let others: Set = ["value_size", "random_seed"]

    private enum Value: Decodable, Equatable {
        case nothing
        case flag(Bool)
        case number(Double)
        case text(String)
        case list

        init(from decoder: any Decoder) throws {
            let value = try decoder.singleValueContainer()
            if value.decodeNil() {
                self = .nothing
            } else if let flag = try? value.decode(Bool.self) {
                self = .flag(flag)
            } else if let number = try? value.decode(Double.self) {
                self = .number(number)
            } else if let text = try? value.decode(String.self) {
                self = .text(text)
            } else {
                self = .list
            }
        }

        var text: String {
            switch self {
            case .nothing: "null"
            case .flag(let flag): "\(flag)"
            case .number(let number): Int(exactly: number).map(String.init) ?? "\(number)"
            case .text(let text): "'\(text)'"
            case .list: "a list"
            }
        }
    }

    /// Reads the names of the Python settings. Checked as in the other initialisers; settings of
    /// Python that are not served here are refused by name.
    public init(from decoder: any Decoder) throws {
        for (name, value) in try [String: Value](from: decoder).sorted(by: { $0.key < $1.key })
        where CodingKeys(rawValue: name) == nil && !Self.others.contains(name) {
            guard let same = Self.unserved[name] else {
                throw failure("\(name) is \(value.text), expected settings that are known here.")
            }
            guard same.contains(value) else {
                throw failure(
                    "\(name) is \(value.text), expected \(same[0].text): that is not served in Swift."
                )
            }
        }
        let values = try decoder.container(keyedBy: CodingKeys.self)
        guard try !values.decodeNil(forKey: .maxKVSize) else {
            throw failure("max_kv_size is null, expected a number: a cache here has a budget.")
        }
        // Files of versions without `diversity` call the moving average "h2o".
        let isOlder = !values.contains(.diversity)
        let named = try values.decode(PolicyName.self, forKey: .policy)
        try self.init(
            maxKVSize: values.decode(Int.self, forKey: .maxKVSize),
            sinkSize: values.decode(Int.self, forKey: .sinkSize),
            heavySize: values.decode(Int.self, forKey: .heavySize),
            recentSize: values.decode(Int.self, forKey: .recentSize),
            policy: isOlder && named == .h2o ? .h2oEma : named,
            diversity: values.decodeIfPresent(Double.self, forKey: .diversity) ?? 0.5,
            decay: values.decode(Double.self, forKey: .decay),
            evictEvery: values.decode(Int.self, forKey: .evictEvery),
            speculative: values.decodeIfPresent(Int.self, forKey: .speculative) ?? 0,
            kvBits: values.decodeIfPresent(Int.self, forKey: .kvBits),
            valueBits: values.decodeIfPresent(Int.self, forKey: .valueBits),
            kvFrame: values.decodeIfPresent(Bool.self, forKey: .framing) ?? false,
            kvGroupSize: values.decodeIfPresent(Int.self, forKey: .kvGroupSize) ?? 64,
            kvFormat: Self.format(values.decodeIfPresent(String.self, forKey: .kvFormat)),
            contextSize: values.decodeIfPresent(Int.self, forKey: .contextSize))
    }

    private static func format(_ name: String?) throws -> KVFormat? {
        guard let name else { return nil }
        guard let format = KVFormat(rawValue: name) else {
            let known = KVFormat.allCases.map(\.rawValue).joined(separator: ", ")
            throw failure("kv_format is '\(name)', expected one of: \(known).")
        }
        return format
    }
}
