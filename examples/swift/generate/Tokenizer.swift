import Foundation

/// A byte-level BPE tokenizer in the form of `tokenizer.json`: that of GPT-2, Llama 3, Qwen and the
/// demo model. Other kinds are refused by name. No chat template is applied.
struct Tokenizer {
    private let vocabulary: [String: Int]
    /// Pairs of pieces, and which of them are joined first.
    private let ranks: [[String]: Int]
    /// Text of special tokens, longest first.
    private let added: [(text: String, token: Int)]
    /// What is a word of its own, one after the other.
    private let splits: [NSRegularExpression]
    /// What stands before a text.
    private let opening: [Int]
    /// Whether accents are composed with their letters (NFC).
    private let composes: Bool
    private let joinsWholeWords: Bool
    private let pieces: [Int: Data]

    private struct Unserved: Error, CustomStringConvertible {
        let description: String
    }

    init(_ file: Data) throws {
        guard let root = try JSONSerialization.jsonObject(with: file) as? [String: Any],
            let model = root["model"] as? [String: Any],
            let vocabulary = model["vocab"] as? [String: Int],
            let merges = model["merges"] as? [Any]
        else { throw Unserved(description: "tokenizer.json holds no vocabulary with merges") }
        guard model["type"] as? String == "BPE", model["byte_fallback"] as? Bool != true else {
            throw Unserved(description: "tokenizer.json is no byte-level BPE")
        }
        let normalizer = (root["normalizer"] as? [String: Any])?["type"] as? String
        guard normalizer == nil || normalizer == "NFC" else {
            throw Unserved(description: "the normalizer \(normalizer ?? "") is not served")
        }
        composes = normalizer != nil
        self.vocabulary = vocabulary
        ranks = try Dictionary(
            merges.enumerated().map { rank, merge in
                let pair =
                    merge as? [String]
                    ?? (merge as? String)?.split(separator: " ").map(String.init) ?? []
                guard pair.count == 2 else {
                    throw Unserved(description: "merge \(rank) is no pair")
                }
                return (pair, rank)
            }, uniquingKeysWith: { first, _ in first })
        joinsWholeWords = model["ignore_merges"] as? Bool ?? false
        splits = try Self.splits(root["pre_tokenizer"])
        let special = (root["added_tokens"] as? [[String: Any]] ?? []).compactMap { entry in
            (entry["content"] as? String).flatMap { text in
                (entry["id"] as? Int).map { (text: text, token: $0) }
            }
        }
        added = special.sorted { $0.text.count > $1.text.count }
        opening = Self.opening(root["post_processor"])
        var pieces: [Int: Data] = [:]
        for (piece, token) in vocabulary {
            pieces[token] = Data(piece.unicodeScalars.map { Self.bytes[$0] ?? UInt8(ascii: "?") })
        }
        for (text, token) in added { pieces[token] = Data(text.utf8) }
        self.pieces = pieces
    }

    /// What a token stands for; several may make up one character.
    func bytes(of token: Int) -> Data { pieces[token] ?? Data() }

    func encode(_ text: String) throws -> [Int] {
        var tokens = opening
        var rest = Substring(text)
        while !rest.isEmpty {
            let found = added.compactMap { special in
                rest.range(of: special.text).map { ($0, special.token) }
            }.min { $0.0.lowerBound < $1.0.lowerBound }
            let end = found?.0.lowerBound ?? rest.endIndex
            let text = String(rest[..<end])
            tokens += try words(composes ? text.precomposedStringWithCanonicalMapping : text)
                .flatMap(encode(word:))
            guard let found else { break }
            tokens.append(found.1)
            rest = rest[found.0.upperBound...]
        }
        return tokens
    }

    // MARK: Words

    private static let gpt2 =
        #"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"#

    private static func splits(_ given: Any?) throws -> [NSRegularExpression] {
        guard let given = given as? [String: Any], let type = given["type"] as? String else {
            throw Unserved(description: "tokenizer.json names no pre_tokenizer")
        }
        switch type {
        case "Sequence":
            return try (given["pretokenizers"] as? [Any] ?? []).flatMap { try splits($0) }
        case "Digits":
            let digits = given["individual_digits"] as? Bool == true ? #"\p{N}"# : #"\p{N}+"#
            return [try NSRegularExpression(pattern: digits)]
        case "ByteLevel":
            guard given["add_prefix_space"] as? Bool != true else {
                throw Unserved(description: "add_prefix_space is not served")
            }
            guard given["use_regex"] as? Bool != false else { return [] }
            return [try NSRegularExpression(pattern: gpt2)]
        case "Split":
            guard let pattern = (given["pattern"] as? [String: Any])?["Regex"] as? String,
                given["behavior"] as? String == "Isolated"
            else { throw Unserved(description: "a Split that does not isolate is not served") }
            return [try NSRegularExpression(pattern: pattern)]
        default: throw Unserved(description: "the pre_tokenizer \(type) is not served")
        }
    }

    /// The words of a text, which follow each other.
    private func words(_ text: String) -> [String] {
        splits.reduce([text].filter { !$0.isEmpty }) { words, split in
            words.flatMap { word in
                let whole = NSRange(word.startIndex..., in: word)
                var parts: [String] = []
                var end = word.startIndex
                for match in split.matches(in: word, range: whole) {
                    guard let range = Range(match.range, in: word), !range.isEmpty else { continue }
                    if range.lowerBound > end { parts.append(String(word[end..<range.lowerBound])) }
                    parts.append(String(word[range]))
                    end = range.upperBound
                }
                if end < word.endIndex { parts.append(String(word[end...])) }
                return parts
            }
        }
    }

    /// Join the pair of least rank until no pair is left that may be joined.
    private func encode(word: String) throws -> [Int] {
        var parts = word.utf8.map { String(Self.characters[Int($0)]) }
        if joinsWholeWords, let token = vocabulary[parts.joined()] { return [token] }
        while parts.count > 1 {
            let pairs = parts.indices.dropLast().compactMap { place in
                ranks[[parts[place], parts[place + 1]]].map { (rank: $0, place: place) }
            }
            guard let best = pairs.min(by: { ($0.rank, $0.place) < ($1.rank, $1.place) }) else {
                break
            }
            parts.replaceSubrange(
                best.place...best.place + 1, with: [parts[best.place] + parts[best.place + 1]])
        }
        return try parts.map { part in
            guard let token = vocabulary[part] else {
                throw Unserved(description: "the vocabulary has no token for '\(part)'")
            }
            return token
        }
    }

    /// Special tokens before a text, by the template of a post-processor.
    private static func opening(_ given: Any?) -> [Int] {
        guard let given = given as? [String: Any] else { return [] }
        if let inner = given["processors"] as? [Any] { return inner.flatMap { opening($0) } }
        guard let template = given["single"] as? [[String: [String: Any]]],
            let special = given["special_tokens"] as? [String: [String: Any]]
        else { return [] }
        return template.prefix { $0["Sequence"] == nil }.flatMap { part in
            (part["SpecialToken"]?["id"] as? String).flatMap { special[$0]?["ids"] as? [Int] } ?? []
        }
    }

    // MARK: Bytes as characters

    /// The character that stands for each byte: itself where it can be seen, else one from 256 on.
    private static let characters: [Character] = {
        let visible = [33...126, 161...172, 174...255].joined()
        var next: UInt32 = 256
        return (UInt32(0)..<256).map { byte in
            if visible.contains(Int(byte)), let scalar = Unicode.Scalar(byte) {
                return Character(scalar)
            }
            defer { next += 1 }
            return Unicode.Scalar(next).map { Character($0) } ?? "?"
        }
    }()

    private static let bytes: [Unicode.Scalar: UInt8] = Dictionary(
        uniqueKeysWithValues: characters.enumerated().map {
            ($1.unicodeScalars.first ?? "?", UInt8($0))
        })
}
