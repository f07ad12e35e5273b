// swift-tools-version: 6.2
import PackageDescription

// The sources under swift/Sources/MLXH2O* are the same everywhere; this file decides what they
// stand on: mlx-swift and mlx-swift-lm on Apple platforms; on Linux, thin modules of the same names
// over the C subset in mlx-c/ and the libmlx of a Python wheel. Building on Linux takes nothing
// from the network.

let warningsAreErrors: [SwiftSetting] = [.treatAllWarnings(as: .error)]

#if os(Linux)
// The folder `mlx` of an installed wheel. The environment and the fixed link are part of what
// SwiftPM keys its manifest cache on; the contents of a file would not be.
let mlxRoot = Context.environment["MLX_ROOT"] ?? "\(Context.packageDirectory)/.mlx"
let cxx: [CXXSetting] = [
    .treatAllWarnings(as: .error),
    // libstdc++ 12 names std::result_of, which C++20 deprecates, inside templates that MLX
    // instantiates.
    .disableWarning("deprecated-declarations"),
    .unsafeFlags([
        "-isystem", "\(mlxRoot)/include",
        "-include", "\(Context.packageDirectory)/swift/linux/require_mlx.h",
        // C++20 turns #include of a header with a module map into an import, which SwiftPM does not
        // prepare.
        "-fno-cxx-modules",
    ]),
]
let link: [LinkerSetting] = [
    .linkedLibrary("mlx"),
    .unsafeFlags(["-L\(mlxRoot)/lib", "-Xlinker", "-rpath", "-Xlinker", "\(mlxRoot)/lib"]),
]
let dependencies: [Package.Dependency] = []
let mlx: Target.Dependency = "MLX"
let mlxNN: Target.Dependency = "MLXNN"
let mlxLMCommon: Target.Dependency = "MLXLMCommon"
let cmlx: [Target.Dependency] = ["Cmlx"]
let cBindings: [Target.Dependency] = ["Cmlx", "MLXH2OCore"]
let cBindingSettings: [CXXSetting] = cxx + [.define("MLX_H2O_NATIVE")]
let cxxStandard = CXXLanguageStandard.cxx20  // as MLX's headers ask
let platformTargets: [Target] = [
    .target(
        name: "Cmlx", path: "mlx-c", sources: ["unity"], publicHeadersPath: "include",
        cxxSettings: cxx, linkerSettings: link),
    .target(
        name: "MLXH2OCore", path: "core",
        sources: [
            "unity",
            "src/rows/accumulation_kernel.cpp",
            "src/attention/attention_avx2_kernel.cpp",
            "src/attention/attention_avx512_kernel.cpp",
            "src/attention/attention_kernel.cpp",
            "src/attention/attention_neon_kernel.cpp",
            "src/attention/attention_scalar_kernel.cpp",
            "src/rows/key_diversity_kernel.cpp",
            "src/folding/folding_kernel.cpp",
            "src/attention/prefill_kernel.cpp",
            "src/quantized/quantization_kernel.cpp",
            "src/rows/selection_kernel.cpp",
            "src/cpu/thread_count.cpp",
            "src/cpu/thread_pool.cpp",
            "src/quantized/turbo_kernel.cpp",
        ], publicHeadersPath: "include",
        cxxSettings: cxx + [.headerSearchPath("src")], linkerSettings: link),
    .target(
        name: "MLX", dependencies: ["Cmlx"], path: "swift/Sources/MLX",
        swiftSettings: warningsAreErrors),
    .target(
        name: "MLXNN", dependencies: ["MLX"], path: "swift/Sources/MLXNN",
        swiftSettings: warningsAreErrors),
    .target(
        name: "MLXLMCommon", dependencies: ["MLX", "MLXNN"], path: "swift/Sources/MLXLMCommon",
        swiftSettings: warningsAreErrors),
    .executableTarget(
        name: "mlx-h2o-parity", dependencies: [mlx, "MLXH2O", "MLXH2OLM"],
        path: "swift/Sources/mlx-h2o-parity", swiftSettings: warningsAreErrors),
    .executableTarget(
        name: "h2o-generate", dependencies: [mlx, mlxNN, mlxLMCommon, "MLXH2O", "MLXH2OLM"],
        path: "examples/swift/generate", swiftSettings: warningsAreErrors),
    .executableTarget(
        name: "mlx-h2o-example", dependencies: [mlx, "MLXH2O", "MLXH2OLM"],
        path: "examples/swift", exclude: ["generate"], swiftSettings: warningsAreErrors),
    .testTarget(
        name: "ThinMLXTests",
        dependencies: ["MLX", "MLXNN", "MLXLMCommon", "MLXH2O", "MLXH2OLM"],
        path: "swift/Tests/ThinMLXTests", swiftSettings: warningsAreErrors),
]
#else
let dependencies: [Package.Dependency] = [
    .package(url: "https://github.com/ml-explore/mlx-swift", .upToNextMinor(from: "0.31.4")),
    .package(url: "https://github.com/ml-explore/mlx-swift-lm", from: "3.31.4"),
]
let mlx: Target.Dependency = .product(name: "MLX", package: "mlx-swift")
let mlxNN: Target.Dependency = .product(name: "MLXNN", package: "mlx-swift")
let mlxLMCommon: Target.Dependency = .product(name: "MLXLMCommon", package: "mlx-swift-lm")
// mlx-swift's C module comes with its product.
let cmlx: [Target.Dependency] = [mlx]
let cBindings: [Target.Dependency] = [mlx]
let cBindingSettings: [CXXSetting] = []
// C++20 would import headers as modules, see -fno-cxx-modules; nothing here needs it.
let cxxStandard = CXXLanguageStandard.cxx17
// Apps are offered two libraries and no commands; the tests read golden vectors by what the command
// is made of.
let platformTargets: [Target] = [
    .target(
        name: "mlx-h2o-parity", dependencies: [mlx, "MLXH2O", "MLXH2OLM"],
        path: "swift/Sources/mlx-h2o-parity", exclude: ["main.swift"],
        swiftSettings: warningsAreErrors)
]
#endif

let package = Package(
    name: "mlx-h2o",
    platforms: [.macOS(.v14), .iOS(.v17), .tvOS(.v17), .visionOS(.v1)],
    products: [
        .library(name: "MLXH2O", targets: ["MLXH2O"]),
        .library(name: "MLXH2OLM", targets: ["MLXH2OLM"]),
    ],
    dependencies: dependencies,
    targets: platformTargets + [
        .target(
            name: "CMLXH2O", dependencies: cBindings, path: "mlx-c/h2o", sources: ["unity"],
            publicHeadersPath: "include", cxxSettings: cBindingSettings),
        .target(
            name: "CMLXH2OReport", dependencies: cmlx, path: "swift/Sources/CMLXH2OReport"),
        .target(
            name: "MLXH2O", dependencies: [mlx, "CMLXH2O", "CMLXH2OReport"],
            path: "swift/Sources/MLXH2O", swiftSettings: warningsAreErrors),
        .target(
            name: "MLXH2OLM", dependencies: [mlx, mlxNN, mlxLMCommon, "MLXH2O"],
            path: "swift/Sources/MLXH2OLM", swiftSettings: warningsAreErrors),
        .testTarget(
            name: "MLXH2OTests", dependencies: [mlx, "MLXH2O", "mlx-h2o-parity"],
            path: "swift/Tests/MLXH2OTests", swiftSettings: warningsAreErrors),
        .testTarget(
            name: "MLXH2OLMTests", dependencies: [mlx, mlxNN, mlxLMCommon, "MLXH2O", "MLXH2OLM"],
            path: "swift/Tests/MLXH2OLMTests", swiftSettings: warningsAreErrors),
    ],
    swiftLanguageModes: [.v6],
    cxxLanguageStandard: cxxStandard
)
