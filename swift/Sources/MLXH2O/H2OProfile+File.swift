import Foundation
import MLX

// The file of a profile: safetensors, of which all that is said is checked before it is read.

private let format = 1

/// What the metadata says.
private struct About: Decodable {
    let format: Int
    let model: String
    let fingerprint: String
    let policy: String
    let tokens: Int32
    let recentSize: Int32

    enum CodingKeys: String, CodingKey {
        case format, model, fingerprint, policy, tokens
        case recentSize = "recent_size"
    }
}

/// An array of the header; or the metadata, of which one text counts.
private struct Entry: Decodable {
    let dtype: String?
    let shape: [Int]?
    let dataOffsets: [Int]?
    let profile: String?

    enum CodingKeys: String, CodingKey {
        case dtype, shape
        case dataOffsets = "data_offsets"
        case profile = "mlx_h2o_profile"
    }
}

extension H2OProfile {
    /// The profile that a file of `mlx_h2o calibrate` holds.
    ///
    /// - Parameter url: the file
    /// - Throws: ``H2OError`` where there is none, or it holds no profile, a damaged one, one of a
    ///   later format, or an unfinished one
    public init(contentsOf url: URL) throws {
        let name = url.lastPathComponent
        func unfit(_ problem: String) -> H2OError { H2OError("H2OProfile", "\(name) \(problem).") }
        let data: Data
        do {
            data = try Data(contentsOf: url)
        } catch {
            throw unfit("cannot be read: \(error.localizedDescription)")
        }
        guard let (header, body) = Self.parts(of: data) else {
            throw unfit("is no safetensors file, expected a profile")
        }
        let decoder = JSONDecoder()
        guard let read = try? decoder.decode([String: Entry?].self, from: header) else {
            throw unfit("is no safetensors file, expected a profile")
        }
        let entries = read.compactMapValues { $0 }  // metadata that say nothing are null
        guard let text = entries["__metadata__"]?.profile else {
            throw unfit("is no profile: it does not say of what it is")
        }
        let about: About
        do {
            about = try decoder.decode(About.self, from: Data(text.utf8))
        } catch {
            throw unfit("is no profile: it says \(text)")
        }
        guard about.format == format else {
            throw unfit(
                "has format \(about.format), expected \(format), or another version of mlx-h2o")
        }
        let names = Set(read.keys).subtracting(["__metadata__"])
        guard names == ["loss", "rows", "shares"] else {
            throw unfit("holds the arrays \(names.sorted()), expected loss, rows and shares")
        }
        var words: [String: (shape: [Int], numbers: [UInt32])] = [:]
        for (part, dtype) in [("loss", "F32"), ("rows", "I32"), ("shares", "F32")] {
            guard let entry = entries[part], entry.dtype == dtype,
                let found = Self.numbers(of: entry, in: body)
            else { throw unfit("is damaged: \(part) is not all there, expected \(dtype)") }
            words[part] = found
        }
        guard let loss = words["loss"], let rows = words["rows"], let shares = words["shares"],
            loss.shape.count == 3, loss.shape[1...] == (rows.shape + shares.shape)[...],
            entries.values.compactMap({ $0.dataOffsets?.last }).max() == body.count
        else {
            throw unfit(
                "holds loss, rows and shares of shapes "
                    + "\(["loss", "rows", "shares"].map { words[$0]?.shape ?? [] })")
        }
        let policy: PolicyName
        do {
            policy = try PolicyName(named: about.policy)
        } catch let error as H2OError {
            throw unfit("is for another version of mlx-h2o: \(error)")
        }
        self.init(
            layers: loss.shape[0], model: about.model, fingerprint: about.fingerprint,
            policy: policy, name: name, loss: loss.numbers.map { Float(bitPattern: $0) },
            rows: rows.numbers.map { Int32(bitPattern: $0) },
            shares: shares.numbers.map { Float(bitPattern: $0) }, tokens: about.tokens,
            recentSize: about.recentSize)
        do {
            try checkNumbers()
        } catch let error as H2OError {
            throw unfit("holds no finished profile: \(error)")
        }
    }

    /// The header and what follows it; nil where the file is shorter than it says.
    private static func parts(of data: Data) -> (header: Data, body: Data)? {
        guard data.count >= 8 else { return nil }
        let length = data.prefix(8).reversed().reduce(UInt64(0)) { $0 << 8 | UInt64($1) }
        guard length >= 2, length <= UInt64(data.count - 8) else { return nil }
        let end = data.startIndex + 8 + Int(length)
        return (data[(data.startIndex + 8)..<end], data[end...])
    }

    /// Numbers of four bytes, where all of them are there.
    private static func numbers(
        of entry: Entry, in body: Data
    ) -> (shape: [Int], numbers: [UInt32])? {
        guard let shape = entry.shape, let place = entry.dataOffsets, place.count == 2,
            place[0] >= 0, place[0] <= place[1], place[1] <= body.count
        else { return nil }
        var count = 1
        for size in shape {
            guard size > 0, size <= body.count / count else { return nil }
            count *= size
        }
        guard 4 * count == place[1] - place[0] else { return nil }
        let bytes = [UInt8](body.dropFirst(place[0]).prefix(4 * count))
        let numbers = stride(from: 0, to: bytes.count, by: 4).map { at in
            bytes[at..<at + 4].reversed().reduce(UInt32(0)) { $0 << 8 | UInt32($1) }
        }
        return (shape, numbers)
    }
}
