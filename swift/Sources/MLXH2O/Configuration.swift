import CMLXH2O

/// Settings of an evicting cache: how many rows stay, in which format, and by which policy. They
/// are checked once, at creation, as in Python and C.
///
/// Afterwards `sinkSize + heavySize + recentSize == maxKVSize` always holds.
public struct H2OConfiguration: Sendable, Hashable {
    /// How many rows each KV head keeps, with all sizes filled in.
    public private(set) var budget: Budget
    /// How rows are stored.
    public private(set) var format: Format
    /// What ranks the rows.
    public let policy: Policy

    /// - Throws: ``H2OError`` if a value is out of range or the sizes exceed the budget
    public init(
        _ budget: Budget = Budget(), _ format: Format = .dense, policy: Policy = .keydiff
    ) throws {
        self.policy = policy
        self.budget = try budget.checked(format, policy)
        self.format = try format.checked(self.budget)
    }

    /// The rows that each KV head keeps, and which of them always stay.
    public struct Budget: Sendable, Hashable, Codable {
        /// Rows that each KV head keeps, at least 1. Nil: unbounded, no row is ever evicted.
        public var maxKVSize: Int?
        /// Positions below it are never evicted; fewer than `maxKVSize`.
        public var sinkSize: Int
        /// Rows kept by score. Nil: half of the budget, or what the other two leave; for the policy
        /// `h2o` all but the recent rows, which then are a quarter of the budget, at least 32 and
        /// at most half.
        public var heavySize: Int?
        /// The newest rows, never evicted. What the other two leave, if nil or if the three do not
        /// fill the budget.
        public var recentSize: Int?
        /// Rows of each head that a full cache evicts together, so that only one step in `evictEvery`
        /// evicts; at most the unprotected rows. With 1, each new row evicts one. Nil: one row of
        /// 32, as measured.
        public var evictEvery: Int?
        /// Tokens that a draft model may propose at a time; they count in the budget. The last
        /// `speculative + 1` rows are then never evicted, and can be taken back without a trace.
        public var speculative: Int
        /// Tokens that the model was trained for: rows further back than this from the newest token
        /// are evicted first, except sinks. Nil:
        /// `evictingCaches(for:configuration:policy:budgets:)` uses the value of an
        /// `H2OTransformer`; in other caches, and with 0, only the policy decides.
        public var contextSize: Int?
        /// Budgets of shorter texts, from Python's division of rows over KV heads: pairs of a
        /// number of tokens, ascending, and the rows until more tokens have been seen. After the
        /// last pair, and if nil, `maxKVSize` rows.
        public var rowsAt: [[Int]]?
        /// Like `sinkSize`, for a text that many prompts begin with: its rows are not even ranked.
        /// From files.
        package var prefixSize: Int?

        /// Not checked until the settings are made.
        public init(
            _ maxKVSize: Int? = 256, sinkSize: Int = 4, heavySize: Int? = nil,
            recentSize: Int? = nil, evictEvery: Int? = nil, speculative: Int = 0,
            contextSize: Int? = nil, rowsAt: [[Int]]? = nil
        ) {
            self.maxKVSize = maxKVSize
            self.sinkSize = sinkSize
            self.heavySize = heavySize
            self.recentSize = recentSize
            self.evictEvery = evictEvery
            self.speculative = speculative
            self.contextSize = contextSize
            self.rowsAt = rowsAt
        }

        enum CodingKeys: String, CodingKey, CaseIterable {
            case maxKVSize = "max_kv_size"
            case sinkSize = "sink_size"
            case heavySize = "heavy_size"
            case recentSize = "recent_size"
            case evictEvery = "evict_every"
            case speculative
            case contextSize = "context_size"
            case rowsAt = "rows_at"
            case prefixSize = "prefix_size"
        }
    }

    /// How rows are stored: unpacked, affine, or as codes.
    public struct Format: Sendable, Hashable, Encodable {
        /// Bits of each element of affine keys, and of the values unless ``valueBits`` differ.
        public private(set) var kvBits: Int?
        /// Bits of affine values; nil: ``kvBits``.
        public private(set) var valueBits: Int?
        /// The newest rows, which are not quantised yet; nil: a default, which the settings fill in.
        public fileprivate(set) var denseSize: Int? = 0
        /// Whether affine rows are stored relative to a centre of their head, and rotated. Nil if
        /// there are none.
        private(set) var kvFrame: Bool?
        /// Elements that share a scale and a bias. Row sizes that it does not divide use 32.
        public private(set) var kvGroupSize = 64
        /// For rows as codes of rotated directions.
        public private(set) var kvFormat: KVFormat?
        /// Of packed rows: attention does not read values whose weight is below it. From files.
        public internal(set) var sparseV: Float = 0

        /// Rows stay unpacked.
        public static let dense = Format()

        /// Rows of 2, 3, 4, 5, 6 or 8 bits; 32, 64 or 128 elements share a scale and a bias. In a
        /// frame: relative to a centre of their head, and rotated.
        ///
        /// Most of the loss of few bits comes from the newest rows: `denseSize` of them, fewer than
        /// `recentSize`, stay unquantised. Nil: 8 in an unbounded cache with values of at most 4
        /// bits, else 0.
        public static func affine(
            _ kvBits: Int, valueBits: Int? = nil, denseSize: Int? = nil, isFramed: Bool = true,
            groupSize: Int = 64
        ) -> Format {
            Format(
                kvBits: kvBits, valueBits: valueBits, denseSize: denseSize,
                kvFrame: isFramed ? true : nil, kvGroupSize: groupSize)
        }

        /// Rows are codes of rotated directions; keys of 8 bits have scales and biases.
        public static func codes(_ kvFormat: KVFormat, groupSize: Int = 64) -> Format {
            Format(kvGroupSize: groupSize, kvFormat: kvFormat)
        }

        /// The format that names from flags or files describe.
        ///
        /// - Throws: ``H2OError`` if they do not fit together, or there is no such format
        public static func named(
            kvBits: Int? = nil, valueBits: Int? = nil, denseSize: Int? = nil,
            isFramed: Bool = true, groupSize: Int = 64, kvFormat: String? = nil
        ) throws -> Format {
            var format = Format(
                kvBits: kvBits, valueBits: valueBits, denseSize: denseSize,
                kvFrame: kvBits != nil && isFramed ? true : nil, kvGroupSize: groupSize)
            guard let kvFormat else { return format }
            if let kvBits { throw failure("kv_bits is \(kvBits), expected none with kv_format.") }
            format.kvFormat = KVFormat(rawValue: kvFormat)
            guard format.kvFormat == nil else { return format }
            let known = KVFormat.allCases.map(\.rawValue).joined(separator: ", ")
            throw failure("kv_format is '\(kvFormat)', expected one of: \(known).")
        }

        /// Whether rows are stored in a frame of their head.
        public var isFramed: Bool { kvFrame ?? false }

        enum CodingKeys: String, CodingKey, CaseIterable {
            case kvBits = "kv_bits"
            case valueBits = "v_bits"
            case denseSize = "dense_size"
            case kvFrame = "kv_frame"
            case kvGroupSize = "kv_group_size"
            case kvFormat = "kv_format"
            case sparseV = "sparse_v"
        }
    }

    /// What ranks the rows, with its settings.
    public struct Policy: Sendable, Hashable, Encodable {
        /// Which policy it is.
        public let name: PolicyName
        /// For `h2o`: the share of the rows kept by rank that goes to the diversity of their keys.
        public let diversity: Double
        /// For `h2o-ema`: `a` of the moving average `C = a*C + (1-a)*|s|`.
        public let decay: Double
        fileprivate(set) var fold: Bool?
        /// For `h2o`: whether evicted rows are folded into others; else they are dropped.
        public var folds: Bool { fold ?? true }

        /// The policy of this name; settings of other policies are ignored.
        public init(
            _ name: PolicyName, diversity: Double = 0.5, decay: Double = 0.95, folds: Bool = true
        ) {
            (self.name, self.diversity, self.decay) = (name, diversity, decay)
            fold = folds ? nil : false  // as Python's files have it
        }

        /// By the diversity of keys; needs no scores.
        public static let keydiff = Policy(.keydiff)
        /// By age; needs no scores.
        public static let window = Policy(.window)
        /// By attention mass and the diversity of keys; folds evicted rows into others.
        public static let h2o = Policy(.h2o)
        /// By a moving average of scores, as published.
        public static let h2oEma = Policy(.h2oEma)

        enum CodingKeys: String, CodingKey, CaseIterable {
            case name = "policy"
            case diversity, decay, fold
        }
    }

    /// Published splits of the budget (AtomGradient 2026, section 4.1): with 256 rows, 4 are sinks
    /// and 128, 64 or 32 are kept by score. The sinks do not scale with the budget; the recent
    /// window takes the rest.
    public enum Preset: String, Sendable, CaseIterable {
        /// Half is kept by score.
        case heavy
        /// A quarter.
        case balanced
        /// An eighth.
        case recent
    }

    /// As published: the policy `h2o-ema`, and a split scaled to `maxKVSize`.
    ///
    /// - Throws: ``H2OError`` if `maxKVSize` is out of range
    public init(
        preset: Preset, maxKVSize: Int = 256, _ format: Format = .dense, policy: Policy = .h2oEma
    ) throws {
        var found = mlx_h2o_config_new()
        _ = try H2OError.catching {
            mlx_h2o_config_preset(&found, preset.rawValue, Int32(clamping: maxKVSize))
        }
        try self.init(Budget(maxKVSize, heavySize: Budget(found).heavySize), format, policy: policy)
    }
}

extension H2OConfiguration {
    /// Rows that each KV head keeps; nil: all.
    public var maxKVSize: Int? { budget.maxKVSize }
    /// Of these, the first positions, which always stay.
    public var sinkSize: Int { budget.sinkSize }
    /// The first positions that always stay.
    package var protectedSize: Int { max(sinkSize, budget.prefixSize ?? 0) }
    /// Rows kept by rank.
    public var heavySize: Int { budget.heavySize ?? 0 }
    /// The newest rows, which stay.
    public var recentSize: Int { budget.recentSize ?? 0 }
    /// Rows of each head that are evicted together.
    public var evictEvery: Int { budget.evictEvery ?? 1 }
    /// Tokens that a draft model may propose at a time.
    public var speculative: Int { budget.speculative }
    /// Tokens that the model was trained for; nil if not set.
    public var contextSize: Int? { budget.contextSize }

    /// The same with affine rows of 8 bits.
    public var with8Bits: H2OConfiguration {
        var found = self
        found.format = .affine(8, denseSize: 0, groupSize: format.kvGroupSize)
        return found
    }

    /// The same for a model trained for `tokens` tokens, if ``contextSize`` is nil.
    public func forModel(contextSize: Int?) -> H2OConfiguration {
        var found = self
        found.budget.contextSize = self.contextSize ?? contextSize.map { max(0, $0) }
        return found
    }

    /// The same with another budget: default sizes and an ``evictEvery`` of one row of 32 follow it,
    /// or the share of heavy rows stays the same. Without `folds`, evicted rows are dropped.
    ///
    /// - Throws: ``H2OError`` if the budget does not suit the other sizes
    public func with(maxKVSize rows: Int, folds: Bool = true) throws -> H2OConfiguration {
        let rows = Int(Int32(clamping: rows))
        var (other, free, own) = (budget, format, policy)
        free.denseSize = nil
        let usual = try H2OConfiguration(.init(maxKVSize, sinkSize: sinkSize), free, policy: policy)
        other.maxKVSize = rows
        other.heavySize =
            heavySize == usual.heavySize
            ? nil : max(0, min(heavySize * rows / (maxKVSize ?? rows), rows - sinkSize - 1))
        (other.recentSize, other.rowsAt) = (nil, nil)
        if evictEvery == usual.evictEvery { other.evictEvery = nil }
        if !folds, own.name == .h2o { own.fold = false }
        return try H2OConfiguration(other, format == usual.format ? free : format, policy: own)
    }
}

extension H2OConfiguration.Budget {
    fileprivate init(_ found: mlx_h2o_config) {
        let budget = found.budget
        self.init(
            Int(budget.max_kv_size), sinkSize: Int(budget.sink_size),
            heavySize: Int(budget.heavy_size.value), recentSize: Int(budget.recent_size.value),
            evictEvery: Int(budget.evict_every.value), speculative: Int(budget.speculative))
    }

    /// The same with all sizes filled in.
    fileprivate func checked(
        _ format: H2OConfiguration.Format, _ policy: H2OConfiguration.Policy
    ) throws -> Self {
        let first = min(sinkSize, prefixSize ?? 0) < 0 ? -1 : max(sinkSize, prefixSize ?? 0)
        var config = mlx_h2o_config_new()
        config.budget = mlx_h2o_budget(
            max_kv_size: Int32(clamping: maxKVSize ?? 1 << 30), sink_size: Int32(clamping: first),
            heavy_size: optional(heavySize), recent_size: optional(recentSize),
            evict_every: optional(evictEvery), speculative: Int32(clamping: speculative),
            context_size: Int32(clamping: contextSize ?? 0))
        config.format.kv_bits = optional(format.kvBits)
        config.format.v_bits = optional(format.valueBits)
        config.format.kv_group_size = Int32(clamping: format.kvGroupSize)
        config.policy.diversity = Float(policy.diversity)
        config.policy.decay = Float(policy.decay)
        try policy.name.rawValue.withCString { name in
            config.policy.name = name
            _ = try H2OError.catching { mlx_h2o_config_resolve(&config) }
        }
        let sizes = max(heavySize ?? 0, recentSize ?? 0, rowsAt?.count ?? 0)
        guard maxKVSize != nil || sizes == 0 else {
            throw failure(
                "max_kv_size is null, expected a number with heavy_size, recent_size or rows_at.")
        }
        var found = maxKVSize == nil ? self : Self(config)
        (found.contextSize, found.prefixSize) = (contextSize, prefixSize)
        found.rowsAt = try checkedRows(least: found.sinkSize + 1)
        found.sinkSize = sinkSize
        return found
    }

    private func checkedRows(least: Int) throws -> [[Int]]? {
        guard let rowsAt else { return nil }
        let (tokens, numbers) = (rowsAt.compactMap(\.first), least...max(least, Int(Int32.max)))
        guard rowsAt.allSatisfy({ $0.count == 2 && $0.allSatisfy(numbers.contains) }),
            tokens == Set(tokens).sorted()
        else {
            throw failure(
                "rows_at is \(rowsAt), expected pairs of tokens, ascending, and rows, more than "
                    + "sink_size = \(least - 1).")
        }
        return rowsAt.isEmpty ? nil : rowsAt
    }
}

extension H2OConfiguration.Format {
    /// The same with ``denseSize`` filled in.
    fileprivate func checked(_ budget: H2OConfiguration.Budget) throws -> Self {
        let (isBounded, fewBits) = (budget.maxKVSize != nil, (valueBits ?? kvBits ?? 8) <= 4)
        let size = denseSize ?? (!isBounded && fewBits ? 8 : 0)
        let recent = isBounded ? budget.recentSize ?? 0 : 1 << 30
        let most = kvBits == nil || budget.rowsAt != nil ? 0 : max(0, recent - 1)
        guard (0...most).contains(size) else {
            throw failure(
                "dense_size is \(size), expected 0 to \(most): fewer than recent_size, and 0 "
                    + "without kv_bits or with rows_at.")
        }
        var found = self
        found.denseSize = size
        return found
    }
}

func failure(_ message: String) -> H2OError {
    H2OError("H2OConfig", message)
}
