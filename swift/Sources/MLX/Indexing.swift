import Cmlx

/// One index of `array[...]`. Of mlx-swift's forms: `...` over several axes (`.ellipsis`), a new
/// axis, and ranges.
public enum MLXArrayIndexOperation {
    case ellipsis
    case newAxis
    case slice(lower: Int?, upper: Int?)
}

public protocol MLXArrayIndex {
    var mlxArrayIndexOperation: MLXArrayIndexOperation { get }
}

public struct MLXEllipsisIndex: MLXArrayIndex, Sendable {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .ellipsis }
}

public struct MLXNewAxisIndex: MLXArrayIndex, Sendable {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation { .newAxis }
}

extension MLXArrayIndex where Self == MLXEllipsisIndex {
    public static var ellipsis: Self { Self() }
}

extension MLXArrayIndex where Self == MLXNewAxisIndex {
    public static var newAxis: Self { Self() }
}

extension Range<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(lower: lowerBound, upper: upperBound)
    }
}

extension PartialRangeFrom<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(lower: lowerBound, upper: nil)
    }
}

extension PartialRangeUpTo<Int>: MLXArrayIndex {
    public var mlxArrayIndexOperation: MLXArrayIndexOperation {
        .slice(lower: nil, upper: upperBound)
    }
}

/// One slice per axis of an array, as the C functions take them.
private struct Slices {
    var start: [Int32] = []
    var stop: [Int32] = []
    /// Axes of the result.
    var newAxes: [Int32] = []

    init(_ operations: [MLXArrayIndexOperation], of shape: [Int]) {
        let sliced = operations.count { if case .slice = $0 { true } else { false } }
        precondition(sliced <= shape.count, "\(sliced) indices of \(shape.count) axes")
        for operation in operations {
            switch operation {
            case .slice(let lower, let upper):
                append(lower, upper, size: shape[start.count])
            case .newAxis:
                newAxes.append(Int32(start.count + newAxes.count))
            case .ellipsis:
                for _ in sliced..<shape.count { append(nil, nil, size: shape[start.count]) }
            }
        }
        // Axes that were not named are taken whole.
        for size in shape[start.count...] { append(nil, nil, size: size) }
    }

    private mutating func append(_ lower: Int?, _ upper: Int?, size: Int) {
        func resolve(_ bound: Int) -> Int32 {
            Int32(Swift.min(Swift.max(bound < 0 ? bound + size : bound, 0), size))
        }
        start.append(resolve(lower ?? 0))
        stop.append(resolve(upper ?? size))
    }

    var steps: [Int32] { start.map { _ in 1 } }
}

extension MLXArray {
    /// Read or write a part. Bounds beyond the array are clamped; a new axis cannot be written to.
    public subscript(
        indices: any MLXArrayIndex..., stream stream: StreamOrDevice = .default
    ) -> MLXArray {
        get {
            let slices = Slices(indices.map(\.mlxArrayIndexOperation), of: shape)
            var result = mlx_array_new()
            mlx_slice(
                &result, ctx, slices.start, slices.start.count, slices.stop, slices.stop.count,
                slices.steps, slices.start.count, stream.ctx)
            let part = MLXArray(result)
            guard !slices.newAxes.isEmpty else { return part }
            var expanded = mlx_array_new()
            mlx_expand_dims_axes(
                &expanded, part.ctx, slices.newAxes, slices.newAxes.count, stream.ctx)
            return MLXArray(expanded)
        }
        set {
            let slices = Slices(indices.map(\.mlxArrayIndexOperation), of: shape)
            precondition(slices.newAxes.isEmpty, "a new axis cannot be written to")
            var result = mlx_array_new()
            mlx_slice_update(
                &result, ctx, newValue.ctx, slices.start, slices.start.count, slices.stop,
                slices.stop.count, slices.steps, slices.start.count, stream.ctx)
            mlx_array_free(ctx)
            ctx = result
        }
    }
}
