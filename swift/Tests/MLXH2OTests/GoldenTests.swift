import Foundation
import MLX
import MLXH2O
import Testing

@testable import mlx_h2o_parity

/// The vectors that every language reads: what the float64 reference says, and how far one may be
/// off.
@Suite struct GoldenTests {
    static let backends: [H2OBackend] = [.native, .composed]

    static let file = URL(fileURLWithPath: #filePath).deletingLastPathComponent()
        .appending(path: "../../../tests/golden/cases.safetensors")

    private func cases(_ op: String) throws -> [Case] {
        try Case.read(Self.file).filter { $0.fields.op == op }
    }

    @Test(arguments: backends) func attention(backend: H2OBackend) throws {
        let cases = try cases("attention")
        #expect(cases.count > 100)
        for parity in cases {
            let results = try withBackend(backend) { try runAttention(parity) }
            #expect((results["lse"] != nil) == parity.fields.returnLse)
            for (part, found) in results {
                let expected = try parity.tensor("\(part)64")
                #expect(found.shape == expected.shape)
                let allowed = try #require(parity.fields.tolerance?[part])
                let error = worst(found, expected)
                #expect(error <= allowed, "\(parity.name)/\(part): \(error), allowed \(allowed)")
            }
        }
    }

    @Test(arguments: backends) func selection(backend: H2OBackend) throws {
        let cases = try cases("keep")
        #expect(cases.count > 20)
        for parity in cases {
            let results = try withBackend(backend) { try runKeep(parity) }
            let found = try #require(results["keep"])
            let expected = try parity.tensor("keep")
            #expect(found.dtype == .uint32)
            #expect(found.shape == expected.shape, "\(parity.name)")
            #expect(
                found.asArray(UInt32.self) == expected.asArray(UInt32.self), "\(parity.name)")
        }
    }

    /// What is left of a whole trace are the reference's rows.
    @Test(arguments: backends) func traces(backend: H2OBackend) throws {
        let cases = try cases("trace")
        #expect(Set(cases.compactMap(\.fields.policy)) == Set(PolicyName.allCases.map(\.rawValue)))
        for parity in cases {
            let results = try withBackend(backend) { try runTrace(parity) }
            let positions = try #require(results["positions"])
            let last = positions[(positions.dim(0) - 1)...].asArray(Int32.self)
            #expect(try last == parity.tensor("kept").asArray(Int32.self), "\(parity.name)")
        }
    }
}
