import Foundation
import MLXH2O

/// The slow cache that the fast one is compared with: lists of rows, in double precision, one head
/// after the other, written from the definitions and sharing no code with the package.
struct ReferenceCache {
    struct Row {
        var position: Int
        var key: [Double]
        var value: [Double]
        var importance: Double?
        /// Rows that it stands for.
        var count = 1
    }

    let maxKVSize: Int
    let sinkSize: Int
    let recentSize: Int
    let evictEvery: Int
    let policy: String
    let decay: Double
    let diversity: Double
    let scale: Double
    /// Query heads per KV head.
    let group: Int
    /// All heads evict by the mean of their ranks.
    let sharedHeads: Bool
    /// Rows further back go first.
    let contextSize: Int
    /// What a cache stores of a key and a value that were made.
    var pack: ([Double], [Double]) -> ([Double], [Double]) = { ($0, $1) }
    /// One list per KV head, in the order of arrival.
    var heads: [[Row]]
    var offset = 0

    /// Settings as of a configuration, for two KV heads.
    init(_ configuration: H2OConfiguration, scale: Float, group: Int) {
        maxKVSize = configuration.maxKVSize
        sinkSize = configuration.sinkSize
        recentSize = configuration.recentSize
        evictEvery = configuration.evictEvery
        policy = configuration.policy.rawValue
        decay = configuration.decay
        diversity = configuration.diversity
        sharedHeads = configuration.sharedHeads
        contextSize = configuration.contextSize ?? 0
        self.scale = Double(scale)
        self.group = group
        heads = [[], []]
    }

    /// Rows [head][token][column]. Evicts, appends and attends; `queries` are per query head.
    /// Returns the output [query head][token][column].
    mutating func step(
        queries: [[[Double]]], keys: [[[Double]]], values: [[[Double]]]
    ) -> [[[Double]]] {
        let added = keys[0].count
        flush()
        if added == 1, heads[0].count == maxKVSize {
            let recentStart = offset + 1 - recentSize
            let most = open(heads[0], recentStart).count
            evict(to: maxKVSize - min(evictEvery, most), recentStart: recentStart)
        }
        for head in heads.indices {
            for token in 0..<added {
                heads[head].append(
                    Row(
                        position: offset + token, key: keys[head][token],
                        value: values[head][token]))
            }
        }
        offset += added
        let outputs = attend(queries)
        for head in heads.indices { score(queries, head: head) }
        return outputs
    }

    /// The output of the last tokens, [query head][token][column], over what is stored.
    func attend(_ queries: [[[Double]]]) -> [[[Double]]] {
        queries.indices.map { attend(queries[$0], head: $0 / group) }
    }

    /// What is beyond the budget goes before anything else happens.
    mutating func flush() {
        evict(to: maxKVSize, recentStart: offset - recentSize)
    }

    /// The positions of each head, ascending.
    var positions: [[Int]] { heads.map { $0.map(\.position).sorted() } }

    private func logits(_ query: [Double], _ token: Int, of count: Int, head: Int) -> [Double?] {
        heads[head].map { row in
            // Bottom-right causal: the query at the end sees all rows.
            row.position > offset - count + token
                ? nil
                : scale * dot(query, row.key) + log(Double(row.count))
        }
    }

    private func attend(_ queries: [[Double]], head: Int) -> [[Double]] {
        queries.enumerated().map { token, query in
            let logits = logits(query, token, of: queries.count, head: head)
            let peak = logits.compactMap { $0 }.max() ?? 0
            let weights = logits.map { $0.map { exp($0 - peak) } ?? 0 }
            let total = weights.reduce(0, +)
            var output = [Double](repeating: 0, count: heads[head][0].value.count)
            for (weight, row) in zip(weights, heads[head]) {
                add(weight / total, row.value, to: &output)
            }
            return output
        }
    }

    /// What the queries say of each row goes into its importance.
    private mutating func score(_ queries: [[[Double]]], head: Int) {
        let count = queries[0].count
        // [query][query head of the group][row]
        let logits = (0..<count).map { token in
            (0..<group).map {
                self.logits(queries[head * group + $0][token], token, of: count, head: head)
            }
        }
        let before = heads[head].map(\.importance)
        let after = ReferencePolicy(name: policy, decay: decay, diversity: diversity).accumulate(
            before, logits)
        for row in heads[head].indices { heads[head][row].importance = after[row] }
    }

    /// Whether a row is further back than the context, and so goes first.
    func leaves(_ row: Row, _ recentStart: Int) -> Bool {
        contextSize > 0 && row.position < recentStart + recentSize - contextSize
    }

    /// The rows are ranked once, by all that are there; then the worst go together.
    private mutating func evict(to size: Int, recentStart: Int) {
        let policy = ReferencePolicy(name: policy, decay: decay, diversity: diversity)
        guard heads[0].count > size else { return }
        var ranks = heads.map {
            policy.ranks($0, keep: size, open: open($0, recentStart))
        }
        if sharedHeads {
            let means = heads[0].indices.map { row in ranks.reduce(0) { $0 + $1[row] } / 2 }
            ranks = heads.map { _ in means }
        }
        for head in heads.indices {
            let rows = heads[head]
            let ranks = rows.indices.map {
                leaves(rows[$0], recentStart) ? -.infinity : ranks[head][$0]
            }
            // Ties: the higher position goes.
            let worst = open(rows, recentStart).sorted {
                (ranks[$0], -rows[$0].position) < (ranks[$1], -rows[$1].position)
            }
            let gone = Set(worst.prefix(rows.count - size))
            if self.policy == "h2o" {
                fold(head, gone, ranks: ranks, recentStart: recentStart)
            }
            heads[head] = rows.indices.filter { !gone.contains($0) }.map { heads[head][$0] }
        }
    }
}
