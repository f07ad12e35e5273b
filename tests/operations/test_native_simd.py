"""Every SIMD target of this machine, forced by MLX_H2O_SIMD in a separate process."""

import subprocess
import sys
from pathlib import Path

import pytest

from back_ends import NATIVE
from mlx_h2o.operations.native import module
from programs import ended

TESTS = Path(__file__).parent

SUITES = ("test_native.py", "test_cache_operations.py", "test_parity_cases.py", "test_turbo.py")

TARGETS: list[str] = []
if not module.unavailable_reason():
    from mlx_h2o import _core

    TARGETS = [target for target in _core.simd_targets() if target != _core.simd_target()]


def run(target: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ended(sys.executable, *arguments, environment={"MLX_H2O_SIMD": target}, cwd=TESTS)


@pytest.mark.exhaustive
@pytest.mark.skipif(not TARGETS, reason="the native back end has no lower SIMD target here")
@pytest.mark.parametrize("target", TARGETS)
def test_a_lower_target_equals_the_reference(target):
    named = run(target, "-c", "from mlx_h2o import _core; print(_core.simd_target())")
    assert named.stdout.strip() == target, named.stderr
    options = ("-q", "-x", "-m", "not exhaustive", "-p", "no:cacheprovider")
    result = run(target, "-m", "pytest", *options, *SUITES)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


@NATIVE
def test_an_unknown_target_makes_the_back_end_unavailable_and_says_so():
    program = (
        "import mlx.core as mx, mlx_h2o; status = mlx_h2o.backends(); "
        "print(status['native'].available, status['composed'].default, status['native'].reason); "
        "mlx_h2o._core.encode_rows(mx.ones((1, 1, 1, 32)), 4, 42)"  # not evaluated
    )
    result = run("mmx", "-c", program)
    assert result.returncode == 1 and "ValueError: [mlx_h2o] MLX_H2O_SIMD" in result.stderr
    assert result.stdout.startswith('False True [mlx_h2o] MLX_H2O_SIMD is "mmx", expected one')
    assert "scalar" in result.stdout
