import Foundation
import MLX
import MLXH2O
import Testing

/// Profiles that Python measured: read, and shared out as Python does (tests/profile_data.py).
@Suite struct ProfileTests {
    private static let folder = URL(filePath: #filePath)
        .deletingLastPathComponent().appending(path: "../../../tests/data/profiles")
        .standardizedFileURL

    private func file(_ name: String) -> URL { Self.folder.appending(path: name) }

    private struct Shared: Decodable {
        struct Settings: Decodable {
            let maxKvSize: Int?
            let sinkSize: Int?
            let evictEvery: Int?
            let decay: Double?
        }
        struct Layer: Decodable {
            let maxKvSize: Int
            let sinkSize: Int
            let heavySize: Int
            let recentSize: Int
            let evictEvery: Int
            let policy: String
        }
        let totalRows: Int
        let settings: Settings
        let layers: [Layer]
    }

    @Test func rowsAreSharedAsInPython() throws {
        let profile = try H2OProfile(contentsOf: file("profile.safetensors"))
        #expect((profile.layers, profile.model, profile.policy) == (5, "tiny", .merge))
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        let all = try decoder.decode(
            [Shared].self, from: Data(contentsOf: file("shares.json")))
        #expect(all.count >= 7)
        for shared in all {
            let given = try H2OConfiguration(
                maxKVSize: shared.settings.maxKvSize ?? 256,
                sinkSize: shared.settings.sinkSize ?? 4, decay: shared.settings.decay ?? 0.95,
                evictEvery: shared.settings.evictEvery, sharedHeads: true, kvBits: 4,
                kvGroupSize: 32)
            let found = try profile.configurations(
                totalRows: shared.totalRows, configuration: given)
            let expected = try shared.layers.map {
                try H2OConfiguration(
                    maxKVSize: $0.maxKvSize, sinkSize: $0.sinkSize, heavySize: $0.heavySize,
                    recentSize: $0.recentSize, policy: PolicyName(named: $0.policy),
                    decay: given.decay, evictEvery: $0.evictEvery, sharedHeads: true, kvBits: 4,
                    kvGroupSize: 32)
            }
            #expect(found == expected, "\(shared.totalRows) rows")
            #expect(found.reduce(0) { $0 + $1.maxKVSize } == shared.totalRows)
        }
        #expect(
            try profile.configurations(totalRows: 120).map(\.kvBits) == [nil, nil, nil, nil, nil])
    }

    @Test func tooFewRowsAreRefused() throws {
        let profile = try H2OProfile(contentsOf: file("profile.safetensors"))
        for rows in [24, 0, -1, Int.min] {
            let error = #expect(throws: H2OError.self) {
                try profile.configurations(totalRows: rows)
            }
            #expect(
                error?.description
                    == "[profile] found \(max(rows, Int(Int32.min))) rows for 5 layers, expected at "
                    + "least 5 for each.")
        }
    }

    /// The fingerprint is that of Python, whatever the dtype of floats.
    @Test func theModelIsChecked() throws {
        let profile = try H2OProfile(contentsOf: file("profile.safetensors"))
        var weights = try loadArrays(url: file("weights.safetensors"))
        #expect(try H2OProfile.fingerprint(of: weights) == profile.fingerprint)
        try profile.check(layers: 5)
        try profile.check(layers: 5, parameters: weights)
        weights["layers.1.weight"] = weights["layers.1.weight"]?.asType(.float32)
        try profile.check(layers: 5, parameters: weights)
        let layers = #expect(throws: H2OError.self) {
            try profile.check(layers: 6, parameters: weights)
        }
        #expect(
            layers?.description
                == "[H2OProfile] profile.safetensors is of the model tiny (\(profile.fingerprint)) "
                + "with 5 evicting layers, expected \(profile.fingerprint) with 6.")
        weights["norm"] = MLXArray(Float(0.25))
        #expect(throws: H2OError.self) { try profile.check(layers: 5, parameters: weights) }
        let name = #expect(throws: H2OError.self) {
            try H2OProfile.fingerprint(of: ["\u{e9}": MLXArray(Float(1))])
        }
        #expect(name?.description.contains("expected printable ASCII") == true)
    }

    private func refused(_ data: Data) throws -> String {
        let url = FileManager.default.temporaryDirectory
            .appending(path: "mlx-h2o-\(UUID().uuidString).safetensors")
        defer { try? FileManager.default.removeItem(at: url) }
        try data.write(to: url)
        let error = #expect(throws: H2OError.self) { try H2OProfile(contentsOf: url) }
        return (error?.description ?? "").replacing(url.lastPathComponent, with: "FILE")
    }

    @Test func whatIsNoProfileIsRefused() throws {
        let missing = #expect(throws: H2OError.self) {
            try H2OProfile(contentsOf: file("none.safetensors"))
        }
        #expect(missing?.description.hasPrefix("[H2OProfile] none.safetensors cannot be") == true)
        let whole = try Data(contentsOf: file("profile.safetensors"))
        let cases: [(Data, String)] = [
            (
                try Data(contentsOf: file("unfinished.safetensors")),
                "holds no finished profile: [profile] there is no number for some layers"
            ),
            (
                try Data(contentsOf: file("weights.safetensors")),
                "is no profile: it does not say of what it is"
            ),
            (Data(), "is no safetensors file"),
            (Data([255, 255, 255, 255, 255, 255, 255, 255, 123]), "is no safetensors file"),
            (whole.prefix(40), "is no safetensors file"),
            (whole.prefix(whole.count - 3), "is damaged: "),
            (whole + [0, 0, 0, 0], "holds loss, rows and shares of shapes"),
        ]
        for (data, text) in cases {
            let found = try refused(data)
            #expect(found.hasPrefix("[H2OProfile] FILE \(text)"), "\(found)")
        }
        // Texts of the same length in the place of others.
        for (old, new, text) in [
            ("[5,4,3]", "[9,4,3]", "is damaged: loss is not all there, expected F32"),
            ("[5,4,3]", "[5,3,4]", "holds loss, rows and shares of shapes [[5, 3, 4], [4], [3]]"),
            ("[5,4,3]", "[0,4,3]", "is damaged: loss is not all there, expected F32"),
            ("\"I32\"", "\"U32\"", "is damaged: rows is not all there, expected I32"),
            ("\"rows\"", "\"rowz\"", "holds the arrays [\"loss\", \"rowz\", \"shares\"]"),
            ("\\\"format\\\": 1", "\\\"format\\\": 2", "has format 2, expected 1"),
            ("\\\"tokens\\\": 320", "\\\"tokenz\\\": 320", "is no profile: it says"),
            (
                "\\\"tokens\\\": 320", "\\\"tokens\\\": 160",
                "holds no finished profile: [profile] rows"
            ),
            ("\\\"merge\\\"", "\\\"morge\\\"", "is for another version of mlx-h2o"),
        ] {
            var data = whole
            let place = try #require(data.firstRange(of: Data(old.utf8)), "\(old)")
            #expect(old.utf8.count == new.utf8.count)
            data.replaceSubrange(place, with: Data(new.utf8))
            let found = try refused(data)
            #expect(found.hasPrefix("[H2OProfile] FILE \(text)"), "\(found)")
        }
    }
}
