"""The Swift leg: an executable that reads a file of cases and writes a file of results."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

import reference
from golden.build import Case
from golden.make import write
from parity import operations
from parity.legs import Leg
from parity.outcome import Outcome
from paths import ROOT
from programs import ended

PRODUCT = "mlx-h2o-parity"


class SwiftLeg(Leg):
    """``mlx-h2o-parity --backend NAME INPUT OUTPUT``, from MLX_H2O_SWIFT_PARITY or .build/."""

    def __init__(self, name: str, backend: str) -> None:
        self.name, self.trace_of = name, backend
        self._versions: dict[str, str] = {}

    def executable(self) -> Path | None:
        named = os.environ.get("MLX_H2O_SWIFT_PARITY")
        built = [ROOT / ".build" / kind / PRODUCT for kind in ("release", "debug")]
        found = [path for path in ([Path(named)] if named else built) if path.is_file()]
        return max(found, key=lambda path: path.stat().st_mtime) if found else None

    def not_run(self) -> str:
        if self.executable() is not None:
            return ""
        if shutil.which("swift") is None:
            return "swift not found"
        return f"{PRODUCT} is not built: swift build --product {PRODUCT}"

    def versions(self) -> dict[str, str]:
        return self._versions

    def run(self, cases: Iterable[Case], directory: Path) -> Iterator[tuple[str, Outcome]]:
        cases = list(cases)
        given, results = (directory / f"{self.name}-{end}.safetensors" for end in ("in", "out"))
        write(given, cases)
        results.unlink(missing_ok=True)
        done = ended(self.executable(), "--backend", self.trace_of, given, results)
        if done.returncode or not results.exists():
            said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
            problem = f"{PRODUCT} ended with {done.returncode} and said: {said[0]}"
            yield from ((case.name, Outcome(error=problem)) for case in cases)
            return
        tensors, metadata = mx.load(str(results), return_metadata=True)
        self._versions = json.loads(metadata.get("versions", "{}"))
        errors = json.loads(metadata.get("errors", "{}"))
        for case in cases:
            yield case.name, _outcome(case, tensors, errors)


def _outcome(case: Case, tensors: dict[str, mx.array], errors: dict[str, str]) -> Outcome:
    if case.name in errors:
        return Outcome(error=errors[case.name])
    start = f"{case.name}/"
    found = {name.removeprefix(start): a for name, a in tensors.items() if name.startswith(start)}
    stored = [_rows(found, name) for name in ("keys", "values")]
    if case.fields["op"] == "append":
        return Outcome(operations.written_rows(case.fields, case.tensors["slots"], stored))
    whole = ("keep", "positions")
    return Outcome(
        {n: np.array(a) if n in whole else reference.float64(a) for n, a in found.items()}
    )


def _rows(found: dict[str, mx.array], name: str) -> mx.array | tuple[mx.array, ...]:
    """An array, or words and norms, or words, scales and biases."""
    names = (f"{name}_{part}" for part in ("words", "norms", "scales", "biases"))
    return found.get(name, tuple(found[part] for part in names if part in found))
