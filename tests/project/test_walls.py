"""How large each room of the project may be, in lines of handwritten code.

A room that grows must shrink elsewhere; a number here only falls.
"""

import subprocess

import pytest

from paths import ROOT

GENERATED = {"_kernel_text.py", "kernel_text.h", "_operation_table.py", "operation_table.h"}
CODE = {".py", ".pyi", ".h", ".c", ".cpp", ".metal", ".swift"}

MOST = {
    "python": 16_751,
    "python/mlx_h2o/caches": 3_262,
    "python/mlx_h2o/commands": 1_449,
    "python/mlx_h2o/demo": 198,
    "python/mlx_h2o/evaluation": 1_492,
    "python/mlx_h2o/hardware": 407,
    "python/mlx_h2o/lm": 2_665,
    "python/mlx_h2o/operations": 2_798,
    "python/mlx_h2o/policies": 501,
    "python/mlx_h2o/serving": 2_517,
    "core": 6_824,
    "metal": 1_874,
    "mlx-c/h2o": 3_055,
    "swift/Sources/MLXH2O": 1_446,
    "swift/Sources/MLXH2OLM": 2_923,
    "benchmarks": 2_649,
    "tests": 29_439,
}


def lines(room: str) -> int:
    """Lines of the files of a room, committed or about to be."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", room)
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {ROOT / name for name in found.split("\0") if name}
    return sum(
        len(file.read_bytes().splitlines())
        for file in files
        if file.suffix in CODE and file.name not in GENERATED and file.is_file()
    )


@pytest.mark.parametrize("room", MOST)
def test_a_room_is_no_larger_than_its_budget(room: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    assert 0 < lines(room) <= MOST[room]
