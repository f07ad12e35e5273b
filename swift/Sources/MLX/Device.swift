import Cmlx

/// Kind of processor.
public enum DeviceType: String, Hashable, Sendable {
    case cpu
    case gpu
}

/// A processor that streams run on.
public final class Device: @unchecked Sendable {
    let ctx: mlx_device

    init(_ ctx: mlx_device) {
        self.ctx = ctx
    }

    public convenience init(_ deviceType: DeviceType, index: Int32 = 0) {
        initError()
        self.init(mlx_device_new_type(deviceType == .cpu ? MLX_CPU : MLX_GPU, index))
    }

    deinit { mlx_device_free(ctx) }

    public var deviceType: DeviceType? {
        var type = MLX_CPU
        guard mlx_device_get_type(&type, ctx) == 0 else { return nil }
        return type == MLX_GPU ? .gpu : .cpu
    }

    public static var cpu: Device { Device(.cpu) }
    public static var gpu: Device { Device(.gpu) }

    public static func defaultDevice() -> Device {
        initError()
        var ctx = mlx_device_new()
        mlx_get_default_device(&ctx)
        return Device(ctx)
    }
}

/// A queue of work on a device. MLX's streams belong to the thread that created them.
public final class Stream: @unchecked Sendable {
    let ctx: mlx_stream

    init(_ ctx: mlx_stream) {
        self.ctx = ctx
    }

    /// The default stream of the default device, for this thread.
    public convenience init() {
        self.init(defaultOf: Device.defaultDevice())
    }

    /// A new stream on `device`.
    public convenience init(_ device: Device) {
        self.init(mlx_stream_new_device(device.ctx))
    }

    convenience init(defaultOf device: Device) {
        var ctx = mlx_stream_new()
        mlx_get_default_stream(&ctx, device.ctx)
        self.init(ctx)
    }

    deinit { mlx_stream_free(ctx) }
}

/// Where an operation runs: the last argument of every operation.
public struct StreamOrDevice: Sendable {
    public let stream: Stream

    private init(_ stream: Stream) {
        self.stream = stream
    }

    /// The default stream of this thread, looked up each time: see ``Stream``.
    public static var `default`: StreamOrDevice { StreamOrDevice(Stream()) }
    public static var cpu: StreamOrDevice { device(.cpu) }
    public static var gpu: StreamOrDevice { device(.gpu) }

    public static func device(_ device: Device) -> StreamOrDevice {
        StreamOrDevice(Stream(defaultOf: device))
    }

    public static func stream(_ stream: Stream) -> StreamOrDevice {
        StreamOrDevice(stream)
    }

    /// The handle that C calls take.
    public var ctx: mlx_stream { stream.ctx }
}
