import CMLXH2O
import Cmlx
import MLX

/// What each evicting layer of a model loses when it alone keeps few rows, as `mlx_h2o calibrate`
/// of the Python package measured it, and rows shared out by that.
///
///     let profile = try H2OProfile(contentsOf: url)
///     try profile.check(layers: 36)
///     let settings = try profile.configurations(totalRows: 36 * 512)
///     let caches = settings.map { evictingCache($0) }  // of MLXH2OLM
public struct H2OProfile: Sendable {
    /// Evicting layers of the model, in whose order everything is.
    public let layers: Int
    /// The model, by its type, such as "qwen3".
    public let model: String
    /// Of the weights that were measured: see ``fingerprint(of:stream:)``.
    public let fingerprint: String
    /// The policy that was measured, which the rows are for.
    public let policy: PolicyName
    /// What messages call it.
    let name: String

    let loss: [Float]
    let rows: [Int32]
    let shares: [Float]
    let tokens: Int32
    let recentSize: Int32

    /// Settings of each layer, whose rows are `totalRows` together, per head; the same as Python's.
    ///
    /// Every layer first gets the fewest rows that were measured, or an equal share where that is
    /// less. Each next row goes where it lowers the sum of the losses most. Rows beyond what was
    /// measured go evenly. A layer whose best recent window is all of its rows evicts by `.window`.
    ///
    /// - Parameters:
    ///   - totalRows: at least `sinkSize + 1` for each layer
    ///   - configuration: the other settings; its sizes, but for the sinks, and its policy are not
    ///     used. An `evictEvery` of one row of 32 follows the budget of the layer
    /// - Throws: ``H2OError`` where there are too few rows
    public func configurations(
        totalRows: Int, configuration: H2OConfiguration? = nil
    ) throws -> [H2OConfiguration] {
        let given = try configuration ?? H2OConfiguration()
        var settings = mlx_h2o_config_new()
        settings.max_kv_size = Int32(clamping: given.maxKVSize)
        settings.sink_size = Int32(clamping: given.sinkSize)
        settings.evict_every = optional(given.evictEvery)
        var found = [mlx_h2o_config](repeating: settings, count: layers)
        try H2OError.catching {
            withProfile { profile in
                found.withUnsafeMutableBufferPointer {
                    _ = mlx_h2o_profile_share(
                        $0.baseAddress, profile, Int32(clamping: totalRows), settings)
                }
            }
        }
        return try found.map {
            try H2OConfiguration(
                maxKVSize: Int($0.max_kv_size), sinkSize: given.sinkSize,
                heavySize: Int($0.heavy_size.value),
                policy: PolicyName(named: String(cString: $0.policy)), decay: given.decay,
                evictEvery: Int($0.evict_every.value), sharedHeads: given.sharedHeads,
                speculative: given.speculative, kvBits: given.kvBits, valueBits: given.valueBits,
                kvGroupSize: given.kvGroupSize,
                kvFormat: given.kvFormat, turboGuard: given.turboGuard,
                contextSize: given.contextSize)
        }
    }

    /// Check that it is of a model: by the number of its evicting layers, and, where the parameters
    /// are at hand, by their ``fingerprint(of:stream:)``.
    ///
    /// - Throws: ``H2OError`` where it is of another one
    public func check(layers: Int, parameters: [String: MLXArray]? = nil) throws {
        let weights = try parameters.map { try Self.fingerprint(of: $0) } ?? fingerprint
        guard layers == self.layers, weights == fingerprint else {
            throw H2OError(
                "H2OProfile",
                "\(name) is of the model \(model) (\(fingerprint)) with \(self.layers) evicting "
                    + "layers, expected \(weights) with \(layers).")
        }
    }

    /// Of a model's weights: 32 hexadecimal digits of the SHA-256 of the name, the shape, the kind
    /// and at most 16 elements of each. Floats count as float32, whatever they are stored in.
    /// Evaluates these elements.
    ///
    /// - Parameters:
    ///   - parameters: by the names that mlx_lm gives them, such as
    ///     "model.layers.0.self_attn.q_proj.weight": all that the model holds, and as it holds them,
    ///     quantised ones as words, scales and biases
    ///   - stream: stream or device to evaluate on
    /// - Throws: ``H2OError`` for a name that is not printable ASCII without quotes and backslashes
    public static func fingerprint(
        of parameters: [String: MLXArray], stream: StreamOrDevice = .default
    ) throws -> String {
        let map = mlx_map_string_to_array_new()
        var text = mlx_string_new()
        defer {
            mlx_map_string_to_array_free(map)
            mlx_string_free(text)
        }
        try H2OError.catching {
            for (name, array) in parameters {
                mlx_map_string_to_array_insert(map, name, array.ctx)
            }
            _ = mlx_h2o_fingerprint(&text, map, stream.ctx)
        }
        return String(cString: mlx_string_data(text))
    }

    /// Throws where the numbers are none of a finished calibration.
    func checkNumbers() throws {
        try H2OError.catching { withProfile { _ = mlx_h2o_profile_check($0) } }
    }

    /// Calls `body` with the profile as C takes it.
    private func withProfile(_ body: (mlx_h2o_profile) -> Void) {
        loss.withUnsafeBufferPointer { loss in
            rows.withUnsafeBufferPointer { rows in
                shares.withUnsafeBufferPointer { shares in
                    policy.rawValue.withCString { policy in
                        body(
                            mlx_h2o_profile(
                                loss: loss.baseAddress, rows: rows.baseAddress,
                                shares: shares.baseAddress, layers: layers, row_count: rows.count,
                                share_count: shares.count, tokens: tokens, recent_size: recentSize,
                                policy: policy))
                    }
                }
            }
        }
    }
}
