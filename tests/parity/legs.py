"""The legs that run in this process: the reference, and the package on each of its back ends."""

import contextlib
import importlib
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

import mlx_h2o
import reference
from emulator import BuildError, EmulatorBackend, compiler
from emulator.cases import compile_all
from golden.build import Case
from mlx_h2o import use_backend
from mlx_h2o.operations import backends
from mlx_h2o.operations.backends import get
from mlx_h2o.operations.gpu import launch
from mlx_h2o.operations.requests import AttentionRequest
from parity import operations, traces
from parity.outcome import Outcome
from parity.trace_reference import run_reference
from programs import ended


class Leg:
    """A column of the table."""

    name = ""
    # The package's back end whose kept positions a trace of this leg must equal at every step.
    trace_of = ""

    def not_run(self) -> str:
        """Why the leg cannot run here; empty if it can."""
        return ""

    def absent(self, case: Case) -> str:
        """Why the case is not for this leg, which shows "n/a" then; empty if it is. What the back
        end of the package serves, other languages have to serve too."""
        return operations.absent(case, get(self.trace_of), self.trace_of) if self.trace_of else ""

    def versions(self) -> dict[str, str]:
        """What ran, for the JSON file."""
        return {
            "python": platform.python_version(),
            "mlx": version("mlx"),
            "mlx_h2o": mlx_h2o.__version__,
        }

    def run(self, cases: Iterable[Case], directory: Path) -> Iterator[tuple[str, Outcome]]:
        """The outcome of each case by name; ``directory`` is for files that are passed on."""
        for case in cases:
            try:
                yield case.name, self.outcome(case)
            except Exception as error:
                yield case.name, Outcome(error=f"{type(error).__name__}: {error}")

    def outcome(self, case: Case) -> Outcome:
        raise NotImplementedError


class ReferenceLeg(Leg):
    """The float64 reference, afresh: the committed expectations must be what it says today."""

    name = "reference"

    def versions(self) -> dict[str, str]:
        return {"python": platform.python_version(), "numpy": np.__version__}

    def outcome(self, case: Case) -> Outcome:
        if case.fields["op"] == "attention":
            found = reference.attention(*operations.inputs(case), **operations.options(case))
            return Outcome({k: a.astype(np.float32) for k, a in found._asdict().items()})
        if case.fields["op"] == "keep":
            rows = (case.tensors["scores"], case.tensors["positions"])
            return Outcome({"keep": reference.keep_indices(*rows, **operations.zones(case))})
        if case.fields["op"] in operations.FUNCTIONS:
            return Outcome()  # the runner has just drawn the case, expectations and all
        return Outcome(run_reference(case))


class PackageLeg(Leg):
    """mlx_h2o with one back end named."""

    def __init__(self, name: str) -> None:
        self.name = self.trace_of = name

    def not_run(self) -> str:
        try:
            get(self.name)
        except ValueError as error:
            return str(error).partition("] ")[2]
        return ""

    def versions(self) -> dict[str, str]:
        if self.name != "native":
            return super().versions()
        core = importlib.import_module("mlx_h2o._core")
        return super().versions() | {"simd": core.simd_target()}

    def outcome(self, case: Case) -> Outcome:
        with use_backend(self.name):
            if case.fields["op"] == "trace":
                return traces.run_python(case, get(self.name))
            return operations.run(case)


class EmulatorLeg(PackageLeg):
    """The Metal text on the host emulator; it may refuse what the kernels do not serve."""

    def __init__(self) -> None:
        super().__init__("emulator")

    def not_run(self) -> str:
        backend = EmulatorBackend()
        reason = backend.unavailable_reason()
        if not reason:
            backends._registered.setdefault("emulator", backend)
        return reason

    def versions(self) -> dict[str, str]:
        told = ended(compiler(), "--version").stdout
        return super().versions() | {"compiler": told.partition("\n")[0]}

    def run(self, cases: Iterable[Case], directory: Path) -> Iterator[tuple[str, Outcome]]:
        cases = list(cases)
        self._compile(cases)
        yield from super().run(cases, directory)

    def _compile(self, cases: list[Case]) -> None:
        """All kernels of decode attention side by side; whatever fails here fails its case."""
        backend = get("emulator")
        work = {}
        for case in cases:
            request = self._request(case)
            if request is not None and not backend.refuses(request):
                plan = launch.plan(request)
                key = tuple((each.kernel.name, str(each.template)) for each in plan.passes)
                work.setdefault(key, (backend, request))
        with contextlib.suppress(BuildError):
            compile_all(work.values())

    def _request(self, case: Case) -> AttentionRequest | None:
        served = case.fields["op"] in (*operations.DECODE, "attention")
        return operations.request(case) if served else None

    def outcome(self, case: Case) -> Outcome:
        request = self._request(case)
        if request is not None and (refusal := get("emulator").refuses(request)):
            return Outcome(refused=refusal)
        return super().outcome(case)
