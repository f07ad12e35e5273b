"""The GPU back ends, with the emulator in place of MLX's launches."""

from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

from emulator import metal_kernel
from emulator.row_cases import named_emulator
from mlx_h2o.operations.gpu import metal
from mlx_h2o.operations.gpu.kernels import compiled


@pytest.fixture
def emulator() -> Iterator[None]:
    """The emulator is the back end that is named."""
    with named_emulator():
        yield


class PipelineLimit:
    """``mx.fast.metal_kernel`` on a GPU that runs ``limit`` threads."""

    def __init__(self, limit: int) -> None:
        self.limit, self.calls = limit, []

    def __call__(self, *names: object, **kernel: object):
        emulated = metal_kernel(*names, **kernel)

        def call(inputs: list[mx.array], **arguments: object) -> list[mx.array]:
            threads = arguments["threadgroup"][0]
            self.calls.append(threads)
            if threads > self.limit:
                raise ValueError(f"Thread group size ({threads}) is greater than  the maximum.")
            return emulated(inputs, **arguments)

        return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], PipelineLimit]]:
    """Makes the GPU of metal.py, which runs this many threads at a time."""

    def make(limit: int = 1024) -> PipelineLimit:
        made = PipelineLimit(limit)
        monkeypatch.setattr(mx.fast, "metal_kernel", made)
        for memory in ("simdgroups", "_known"):
            monkeypatch.setattr(metal.BACKEND, memory, {})
        monkeypatch.setattr(metal.BACKEND, "serves", lambda: True)
        monkeypatch.setattr(metal.BACKEND, "unavailable_reason", lambda: "")
        return made

    compiled.cache_clear()
    yield make
    compiled.cache_clear()
