/// Pieces of a word, which are joined in pairs: each knows its neighbours.
struct Pieces {
    /// By the place of their first character; empty where a piece has been joined to another.
    private(set) var texts: [String]
    private var next: [Int]
    private var previous: [Int]

    init(_ characters: [String]) {
        texts = characters
        next = characters.indices.map { $0 + 1 }
        previous = characters.indices.map { $0 - 1 }
    }

    func after(_ place: Int) -> Int? { next[place] < texts.count ? next[place] : nil }

    func before(_ place: Int) -> Int? { previous[place] < 0 ? nil : previous[place] }

    /// Join a piece and the one after it.
    mutating func join(_ place: Int) {
        guard let other = after(place) else { return }
        texts[place] += texts[other]
        texts[other] = ""
        next[place] = next[other]
        if let after = after(place) { previous[after] = place }
    }
}

/// Pairs of numbers, of which the least comes first.
struct Heap {
    private var pairs: [(Int, Int)] = []

    mutating func push(_ pair: (Int, Int)) {
        pairs.append(pair)
        var place = pairs.count - 1
        while place > 0, pairs[place] < pairs[(place - 1) / 2] {
            pairs.swapAt(place, (place - 1) / 2)
            place = (place - 1) / 2
        }
    }

    mutating func pop() -> (Int, Int)? {
        guard let least = pairs.first, let last = pairs.popLast() else { return nil }
        guard !pairs.isEmpty else { return least }
        pairs[0] = last
        var place = 0
        while let below = [2 * place + 1, 2 * place + 2].filter(pairs.indices.contains)
            .min(by: { pairs[$0] < pairs[$1] }), pairs[below] < pairs[place]
        {
            pairs.swapAt(place, below)
            place = below
        }
        return least
    }
}
