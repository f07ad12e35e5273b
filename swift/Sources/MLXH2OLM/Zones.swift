import MLX

/// What no eviction touches: positions below `sinkSize`, and from `recentStart` on.
struct Zones: Equatable {
    let sinkSize: Int
    let recentStart: Int
}

/// The row of each head that goes next, as attention named it, for as long as that holds.
///
/// A store forgets it with every change of the importance, which every change of the rows is.
struct KnownWorst {
    /// uint32 [B, H]: the worst slots by the importance as it is.
    let slots: MLXArray
    /// The zones of the step that this is about.
    let zones: Zones
}
