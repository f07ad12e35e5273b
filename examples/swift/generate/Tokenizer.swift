import Foundation

/// A byte-level BPE tokenizer in the form of `tokenizer.json`: that of GPT-2, Llama 3, Qwen and the
/// demo model. Other kinds are refused by name. No chat template is applied.
struct Tokenizer {
    private let vocabulary: [String: Int]
    /// Pairs of pieces, and which of them are joined first.
    private let ranks: [[String]: Int]
    /// Special tokens by their texts, and what finds these in a text.
    private let added: [String: Int]
    private let addedTexts: NSRegularExpression
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
            throw Unserved(description: "tokenizer.json is not a byte-level BPE")
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
                    throw Unserved(description: "merge \(rank) is not a pair")
                }
                return (pair, rank)
            }, uniquingKeysWith: { first, _ in first })
        joinsWholeWords = model["ignore_merges"] as? Bool ?? false
        splits = try Self.splits(root["pre_tokenizer"])
        added = Dictionary(
            (root["added_tokens"] as? [[String: Any]] ?? []).compactMap { entry in
                (entry["content"] as? String).flatMap { text in
                    (entry["id"] as? Int).map { (text, $0) }
                }
            }, uniquingKeysWith: { first, _ in first })
        // Of several at one place, the longest.
        let texts = added.keys.sorted { $0.count > $1.count }
            .map(NSRegularExpression.escapedPattern)
        addedTexts = try NSRegularExpression(
            pattern: texts.isEmpty ? "(?!)" : texts.joined(separator: "|"))
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
        try opening
            + Self.parts(of: text, by: addedTexts).flatMap { part in
                if let token = added[part] { return [token] }
                let part = composes ? part.precomposedStringWithCanonicalMapping : part
                return try splits.reduce([part]) { words, split in
                    words.flatMap { Self.parts(of: $0, by: split) }
                }.flatMap(encode(word:))
            }
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

    /// What matches in a text and what lies between, in order.
    private static func parts(of text: String, by pattern: NSRegularExpression) -> [String] {
        // By UTF-16, since a match may end within a character, such as before an accent.
        let whole = text as NSString
        var parts: [String] = []
        var end = 0
        func add(upTo next: Int) {
            guard next > end else { return }
            parts.append(whole.substring(with: NSRange(end..<next)))
            end = next
        }
        for match in pattern.matches(in: text, range: NSRange(0..<whole.length)) {
            add(upTo: match.range.location)
            add(upTo: match.range.upperBound)
        }
        add(upTo: whole.length)
        return parts
    }

    /// Join the pair of least rank, the first of several, until no pair is left that may be joined.
    private func encode(word: String) throws -> [Int] {
        let characters = word.utf8.map { String(Self.characters[Int($0)]) }
        if joinsWholeWords, let token = vocabulary[characters.joined()] { return [token] }
        var pieces = Pieces(characters)
        var pairs = Heap()
        func rank(_ place: Int) -> Int? {
            pieces.after(place).flatMap { ranks[[pieces.texts[place], pieces.texts[$0]]] }
        }
        func add(_ place: Int?) {
            guard let place, let rank = rank(place) else { return }
            pairs.push((rank, place))
        }
        for place in characters.indices { add(place) }
        while let (least, place) = pairs.pop() {
            guard rank(place) == least else { continue }  // one of the two has been joined
            pieces.join(place)
            add(pieces.before(place))
            add(place)
        }
        return try pieces.texts.filter { !$0.isEmpty }.map { part in
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
