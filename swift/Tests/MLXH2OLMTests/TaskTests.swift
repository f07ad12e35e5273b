import MLX
import MLXH2O
import MLXH2OLM
import MLXLMCommon
import Testing

/// A cache belongs to one task; several tasks may each have their own.
@Suite struct TaskTests {
    @Test func cachesOnSeveralTasksAreAsAlone() async throws {
        let alone = try (0..<4).map { try Self.run($0) }
        for _ in 0..<3 {
            let together = try await withThrowingTaskGroup(of: (Int, Kept).self) { group in
                for index in 0..<4 { group.addTask { (index, try Self.run(index)) } }
                return try await group.reduce(into: [Int: Kept]()) { $0[$1.0] = $1.1 }
            }
            for (index, kept) in alone.enumerated() { #expect(together[index] == kept) }
        }
    }

    struct Kept: Equatable, Sendable {
        let positions: [[Int]]
        let outputs: [[Float]]
    }

    /// 40 tokens through a cache of its own: its policy, bits and back end differ by `index`.
    private static func run(_ index: Int) throws -> Kept {
        let tokens = Tokens(count: 40, seed: UInt64(index + 1))
        let cache = evictingCache(
            try H2OConfiguration(
                .init(12, sinkSize: 2), .named(kvBits: index % 2 == 0 ? nil : 8, groupSize: 32),
                policy: .init([.h2o, .keydiff, .h2oEma, .window][index])))
        return try withBackend(index < 2 ? .native : .composed) {
            try withError {
                let outputs = (0..<40).map {
                    let output = attend(tokens, $0..<$0 + 1, cache)
                    asyncEval([output] + cache.state)  // as mlx-swift-lm does, a step ahead
                    return output
                }.map { $0.asArray(Float.self) }
                return Kept(positions: sortedPositions(cache.positions), outputs: outputs)
            }
        }
    }
}
