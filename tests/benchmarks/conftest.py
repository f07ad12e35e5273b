"""The benchmark script that a suite names in ``SCRIPT``, as a module."""

import pytest

from benchmark_scripts import script


@pytest.fixture(scope="module")
def benchmark(request):
    with script(request.module.SCRIPT) as module:
        yield module
