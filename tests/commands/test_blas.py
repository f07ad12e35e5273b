"""`mlx_h2o evaluate` says where MLX's BLAS is the slow one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_h2o.commands.blas import fast_library, hint, only_reference

LINE = "7f0000000000-7f0000001000 r-xp 00000000 08:01 42                         {}\n"
MLX = "/opt/python3/site-packages/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0"
REFERENCE = "/usr/lib/x86_64-linux-gnu/blas/libblas.so.3.11.0"
DEBIAN = "/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3"
OPENBLAS = "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so"
MKL = "/opt/intel/lib/libmkl_rt.so.2"


@pytest.mark.parametrize(
    ("files", "slow"),
    [
        ([], False),
        ([MLX], True),
        ([REFERENCE], True),
        ([DEBIAN], False),
        ([OPENBLAS, MLX], False),
        ([MLX, MKL], False),
        (["/usr/lib/libopenblasp-r0.3.21.so"], False),
        (["/home/openblas/readme", MLX], True),
        (["/usr/lib/x86_64-linux-gnu/libblake3.so.1"], False),
    ],
)
def test_libraries_that_are_known(files: list[str], slow: bool) -> None:
    assert only_reference("".join(map(LINE.format, files)) + "7fff-8000 rw-p 0 00:00 0\n") is slow


@pytest.mark.skipif(sys.platform != "linux", reason="MLX's wheels bring a BLAS on Linux alone")
def test_openblas_ends_the_hint() -> None:
    if mx.default_device().type != mx.DeviceType.cpu:
        assert hint() is None
        return
    ask = [sys.executable, "-c", "from mlx_h2o.commands.blas import hint; print(hint())"]
    bare = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}

    def said(env: dict[str, str]) -> str:
        return subprocess.run(ask, env=env, capture_output=True, text=True, check=True).stdout

    library = fast_library()
    assert f"LD_PRELOAD={library or '/usr/lib/'}" in said(bare)
    if library is None:
        pytest.skip("OpenBLAS is not installed (Debian: libopenblas0-pthread)")
    assert Path(library).is_file()
    assert said(bare | {"LD_PRELOAD": library}).strip() == "None"
