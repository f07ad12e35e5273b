"""The script that a suite names, as a module: ``SCRIPT`` of benchmarks/."""

import pytest

from benchmark_scripts import script


@pytest.fixture(scope="module")
def benchmark(request):
    with script(request.module.SCRIPT) as module:
        yield module
