import Foundation
import MLXH2O
import Testing

private typealias Make = @Sendable () throws -> H2OConfiguration

@Suite struct ConfigurationTests {
    @Test func defaultsAreTheHeavyPreset() throws {
        let defaults = try H2OConfiguration()
        #expect(defaults == (try H2OConfiguration(preset: .heavy, policy: .keydiff)))
        #expect(defaults.policy == .keydiff)
        #expect(defaults.policy.decay == 0.95)
    }

    /// The paper's splits mean its policy.
    @Test(arguments: H2OConfiguration.Preset.allCases)
    func presetsAreWhatWasPublished(preset: H2OConfiguration.Preset) throws {
        #expect(try H2OConfiguration(preset: preset).policy == .h2oEma)
        #expect(try H2OConfiguration(preset: preset, policy: .window).policy == .window)
    }

    @Test(arguments: [(1, 1), (31, 1), (64, 2), (256, 8), (1000, 31)])
    func oneRowOf32LeavesAtATime(rows: Int, group: Int) throws {
        let made = try H2OConfiguration(.init(rows, sinkSize: 0))
        #expect(made.evictEvery == group)
        #expect(try H2OConfiguration(.init(rows, sinkSize: 0, evictEvery: 5)).evictEvery == 5)
    }

    @Test(arguments: [
        (H2OConfiguration.Preset.heavy, 256, [4, 128, 124]), (.balanced, 256, [4, 64, 188]),
        (.recent, 256, [4, 32, 220]), (.heavy, 64, [4, 32, 28]), (.recent, 20, [4, 2, 14]),
        // One recent row, so that the newest row has time to be scored.
        (.heavy, 8, [4, 3, 1]), (.recent, 5, [4, 0, 1]),
    ])
    func presetsScale(preset: H2OConfiguration.Preset, size: Int, expected: [Int]) throws {
        let made = try H2OConfiguration(preset: preset, maxKVSize: size)
        #expect([made.sinkSize, made.heavySize, made.recentSize] == expected)
    }

    @Test func theRecentWindowGrowsToFill() throws {
        let made = try H2OConfiguration(.init(100, sinkSize: 4, heavySize: 20, recentSize: 30))
        #expect(made.recentSize == 76)
        #expect(made.sinkSize + made.heavySize + made.recentSize == made.maxKVSize)
    }

    @Test func whatIsNotGivenTakesWhatIsLeft() throws {
        #expect(try H2OConfiguration(.init(100, recentSize: 80)).heavySize == 16)
        #expect(try H2OConfiguration(.init(100, heavySize: 90)).recentSize == 6)
        // One recent row, so that the newest row has time to be scored.
        #expect(try H2OConfiguration(.init(6, sinkSize: 4)).recentSize == 1)
        #expect(try H2OConfiguration(.init(1, sinkSize: 0)).recentSize == 1)
    }

    private static let denseSizes =
        ": fewer than recent_size, and 0 without kv_bits or with rows_at."
    private static let sizes = "sink_size + heavy_size + recent_size ="
    private static let refused: [(String, Make)] = [
        (
            "max_kv_size is 64, expected at least \(sizes) 4 + 60 + 1 = 65.",
            { try H2OConfiguration(.init(64, heavySize: 60, recentSize: 1)) }
        ),
        (
            "max_kv_size is 64, expected at least \(sizes) 4 + 61 + 0 = 65.",
            { try H2OConfiguration(.init(64, heavySize: 61)) }
        ),
        ("max_kv_size is 0, expected an int of at least 1.", { try H2OConfiguration(.init(0)) }),
        (
            "max_kv_size is -8, expected an int of at least 1.",
            { try H2OConfiguration(preset: .recent, maxKVSize: -8) }
        ),
        (
            "sink_size is -1, expected an int of at least 0.",
            { try H2OConfiguration(.init(sinkSize: -1)) }
        ),
        (
            "heavy_size is -1, expected an int of at least 0.",
            { try H2OConfiguration(.init(heavySize: -1)) }
        ),
        (
            "recent_size is -2, expected an int of at least 0.",
            { try H2OConfiguration(.init(recentSize: -2)) }
        ),
        (
            "policy is 'h2o_sum', expected one of: h2o, h2o-ema, window, keydiff.",
            { try H2OConfiguration(policy: .init(PolicyName(named: "h2o_sum"))) }
        ),
        (
            "evict_every is 0, expected an int of at least 1.",
            { try H2OConfiguration(.init(evictEvery: 0)) }
        ),
        (
            "decay is 1.0, expected a number of at least 0, below 1.",
            { try H2OConfiguration(policy: .init(.keydiff, decay: 1)) }
        ),
        (
            "decay is nan, expected a number of at least 0, below 1.",
            { try H2OConfiguration(policy: .init(.keydiff, decay: .nan)) }
        ),
        (
            "sink_size is 4, expected fewer than max_kv_size = 4: no row could ever be evicted.",
            { try H2OConfiguration(.init(4)) }
        ),
        (
            "kv_bits is 7, expected one of (2, 3, 4, 5, 6, 8).",
            { try H2OConfiguration(.init(), .affine(7)) }
        ),
        (
            "max_kv_size is null, expected a number with heavy_size, recent_size or rows_at.",
            { try H2OConfiguration(.init(nil, heavySize: 3)) }
        ),
        (
            "max_kv_size is null, expected a number with heavy_size, recent_size or rows_at.",
            { try H2OConfiguration(.init(nil, rowsAt: [[9, 9]])) }
        ),
        (
            "sink_size is -1, expected an int of at least 0.",
            { try H2OConfiguration(.init(nil, sinkSize: -1)) }
        ),
        (
            "dense_size is -1, expected 0 to 1073741823\(denseSizes)",
            { try H2OConfiguration(.init(nil), .affine(8, denseSize: -1)) }
        ),
        (
            "dense_size is 28, expected 0 to 27\(denseSizes)",
            { try H2OConfiguration(.init(64), .affine(8, denseSize: 28)) }
        ),
        (
            "dense_size is 2, expected 0 to 0\(denseSizes)",
            { try H2OConfiguration(.init(64, rowsAt: [[90, 80]]), .affine(8, denseSize: 2)) }
        ),
        (
            "dense_size is 2, expected 0 to 0\(denseSizes)",
            { try H2OConfiguration(.init(), .named(denseSize: 2, kvFormat: "turbo3")) }
        ),
        (
            "v_bits is 4, expected kv_bits too.",
            { try H2OConfiguration(.init(), .named(valueBits: 4)) }
        ),
        (
            "kv_bits is 4, expected none with kv_format.",
            { try H2OConfiguration(.init(), .named(kvBits: 4, kvFormat: "turbo3")) }
        ),
        (
            "context_size is -1, expected an int of at least 0.",
            { try H2OConfiguration(.init(contextSize: -1)) }
        ),
        (
            "rows_at is [[9, 9], [8, 9]], expected pairs of tokens, ascending, and rows, more "
                + "than sink_size = 4.",
            { try H2OConfiguration(.init(rowsAt: [[9, 9], [8, 9]])) }
        ),
        (
            "rows_at is [[9, 4]], expected pairs of tokens, ascending, and rows, more than "
                + "sink_size = 4.",
            { try H2OConfiguration(.init(rowsAt: [[9, 4]])) }
        ),
        (
            "kv_group_size is 48, expected one of (32, 64, 128).",
            { try H2OConfiguration(.init(), .affine(8, groupSize: 48)) }
        ),
        (
            "heavy_size is \(Int32.max), expected at most \(1 << 30).",
            { try H2OConfiguration(.init(heavySize: Int(Int32.max), recentSize: Int(Int32.max))) }
        ),
    ]

    @Test(arguments: refused.indices)
    func settingsThatDoNotFitAreRefused(index: Int) throws {
        let (message, make) = Self.refused[index]
        let error = #expect(throws: H2OError.self) { _ = try make() }
        #expect(error?.description == "[H2OConfig] \(message)")
    }

    /// Of files of earlier versions.
    @Test func settingsThatAreGoneAreReadWhereTheyChangedNothing() throws {
        let made = try H2OConfiguration()
        let text = String(decoding: try JSONEncoder().encode(made), as: UTF8.self)
        #expect(!text.contains("fold"))  // which earlier versions do not know
        func read(_ setting: String) throws -> H2OConfiguration {
            let file = Data(text.replacing("{", with: "{\(setting),").utf8)
            return try JSONDecoder().decode(H2OConfiguration.self, from: file)
        }
        for (same, other, said) in [
            ("\"turbo_guard\":0", "\"turbo_guard\":1", "turbo_guard is 1, expected 0"),
            (
                "\"shared_heads\":false", "\"shared_heads\":true",
                "shared_heads is true, expected false: that is not served in Swift"
            ),
        ] {
            #expect(try read(same) == made)
            let error = #expect(throws: H2OError.self) { try read(other) }
            #expect(error?.description.contains(said) == true)
        }
    }

    /// Rows that cost most: those of few bits, where all are kept. Files have the number.
    @Test func theNewestRowsStayUnquantisedByDefault() throws {
        for (rows, format, size) in [
            (nil, H2OConfiguration.Format.affine(8, valueBits: 4), 8), (nil, .affine(4), 8),
            (nil, .affine(8), 0), (nil, .affine(4, valueBits: 5), 0), (nil, .dense, 0),
            (nil, .affine(4, denseSize: 0), 0), (nil, .affine(8, denseSize: 3), 3),
            (nil, .codes(.turbo3), 0), (64, .affine(4), 0), (64, .affine(4, denseSize: 6), 6),
        ] {
            let made = try H2OConfiguration(.init(rows), format)
            #expect(made.format.denseSize == size)
            let data = try JSONEncoder().encode(made)
            let text = String(decoding: data, as: UTF8.self)
            #expect(text.contains("\"dense_size\":\(size)"))
            #expect(text.contains("\"max_kv_size\":\(rows.map { "\($0)" } ?? "null")"))
            #expect(try JSONDecoder().decode(H2OConfiguration.self, from: data) == made)
            for none in ["", "\"dense_size\":null"] where size == 0 {
                let other = text.replacing("\"dense_size\":0", with: none)
                    .replacing(",,", with: ",").replacing(",}", with: "}")
                    .replacing("{,", with: "{")
                #expect(other != text)
                let read = try JSONDecoder().decode(
                    H2OConfiguration.self, from: Data(other.utf8))
                #expect(read == made)
            }
        }
        let zeros = H2OConfiguration.Budget(nil, heavySize: 0, recentSize: 0)
        let unbounded = try H2OConfiguration(zeros, .affine(4))
        #expect(unbounded.format.denseSize == 8)
        let scaled = try unbounded.with(maxKVSize: 100)
        #expect(try scaled == H2OConfiguration(.init(100), .affine(4)))
    }

    @Test func survivesJSONAndChecksWhatItReads() throws {
        let made = try H2OConfiguration(
            .init(48, evictEvery: 3, contextSize: 2048, rowsAt: [[60, 50]]), .codes(.turbo8v3),
            policy: .init(.h2oEma, diversity: 0.25, decay: 0.5, folds: false))
        let data = try JSONEncoder().encode(made)
        #expect(try JSONDecoder().decode(H2OConfiguration.self, from: data) == made)
        for (good, bad) in [
            ("\"max_kv_size\":48", "\"max_kv_size\":3"), ("\"h2o-ema\"", "\"h2o_ema\""),
            ("\"turbo8v3\"", "\"turbo5\""),
        ] {
            let text = String(decoding: data, as: UTF8.self)
            #expect(text.contains(good))
            let broken = Data(text.replacing(good, with: bad).utf8)
            #expect(throws: H2OError.self) {
                try JSONDecoder().decode(H2OConfiguration.self, from: broken)
            }
        }
    }

    /// Settings of Python's that have no argument here go through a file.
    @Test func filesMayNameAPrefixAndSparseV() throws {
        let usual = try JSONEncoder().encode(H2OConfiguration(.init(64), .affine(8)))
        let text = String(decoding: usual, as: UTF8.self).replacing("\"sparse_v\":0,", with: "")
            .replacing("\"recent_size\":28", with: "\"recent_size\":23")
        func read(_ more: String) throws -> H2OConfiguration {
            try JSONDecoder().decode(
                H2OConfiguration.self, from: Data("{\(more), \(text.dropFirst())".utf8))
        }
        let found = try read("\"prefix_size\": 9")
        #expect((found.budget.prefixSize, found.sinkSize, found.protectedSize) == (9, 4, 9))
        #expect(try read("\"sparse_v\": 0.5").format.sparseV == 0.5)
        for given in [found, try read("\"sparse_v\": 0.5")] {
            let again = try JSONEncoder().encode(given)
            #expect(try JSONDecoder().decode(H2OConfiguration.self, from: again) == given)
        }
        for size in [-1, 64, Int.max, Int.min] {
            #expect(throws: H2OError.self) { try read("\"prefix_size\": \(size)") }
        }
    }
}
