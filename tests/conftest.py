"""Shared by all suites: markers, and a report of what is missing."""

import gc
import importlib
import importlib.util
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_h2o
from back_ends import BACKENDS
from mlx_h2o.demo import model_path
from sizes import EACH, FIRST

TESTS = Path(__file__).resolve().parent

MARKERS = {
    "slow": "takes seconds: reads a long text, starts a command, emulates a lot (nox -s slow)",
    "faults": "puts an error into the product and asks whether it is noticed (nox -s faults)",
    "exhaustive": "one of many settings alike (nox -s exhaustive)",
    "matrix(quick)": "many similar settings, of which this many are tried in a plain run",
    "examples": "random examples: a few in a plain run, many in nox -s exhaustive",
    "emulator": "runs the Metal text on the host emulator (needs clang++ or g++)",
    "downstream": "mlx_lm's own behaviour, with caches of ours in the place of its own",
    "gpu": "needs a GPU that MLX can use",
    "swift": "needs the Swift toolchain",
    "real": "reads a text with a real model (nox -s real)",
}

TOOLS = ("g++", "clang++", "clang-format", "swift")
MODULES = ("mlx_lm", "cffi", "hypothesis", "rich")


def missing() -> list[str]:
    """What this machine lacks, as one line each."""
    lines = [f"{tool} not found" for tool in TOOLS if shutil.which(tool) is None]
    lines += [f"{name} not installed" for name in MODULES if importlib.util.find_spec(name) is None]
    return lines


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All but some settings of a test marked ``matrix(quick)`` are ``exhaustive``.

    Of these tests a part, where one is named.
    """
    tests: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix") is not None:
            tests[item.path, item.nodeid.partition("[")[0]].append(item)
    for settings in tests.values():
        (quick,) = settings[0].get_closest_marker("matrix").args
        given = [item.callspec.params for item in settings]
        kept = covering([{name: repr(one[name]) for name in one} for one in given], quick)
        for index, item in enumerate(settings):
            if index not in kept:
                item.add_marker(pytest.mark.exhaustive)
    kinds = ("exhaustive", "examples", "faults")
    many = [item for item in items if any(map(item.get_closest_marker, kinds))]
    left_out = {*many} - {*many[FIRST::EACH]}
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What was imported stays, and no collector looks through it again for every test."""
    gc.collect()
    gc.freeze()


def covering(settings: list[dict[str, str]], count: int) -> set[int]:
    """So many of the settings, each the one that brings most that was not there: values of a
    parameter before pairs of values of two, and of equals the one whose values came up least. Of
    one parameter: evenly spread."""
    if len(settings[0]) == 1:
        count = min(count, len(settings))
        return {len(settings) * i // count for i in range(count)}
    values = [[*setting.items()] for setting in settings]
    pairs = [[*combinations(each, 2)] for each in values]
    chosen: set[int] = set()
    uses: Counter[Any] = Counter()

    def brings(index: int) -> tuple[int, int, int]:
        kinds = [sum(one not in uses for one in kind[index]) for kind in (values, pairs)]
        return *kinds, -sum(uses[one] for one in values[index])

    while len(chosen) < min(count, len(settings)):
        best = max((index for index in range(len(settings)) if index not in chosen), key=brings)
        chosen.add(best)
        uses.update([*values[best], *pairs[best]])
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test draws the same numbers, whichever ran before it; MLX's own seed is a clock's."""
    mx.random.seed(0)


def pytest_report_header() -> list[str]:
    return [f"mlx_h2o: missing: {line}" for line in missing()] or ["mlx_h2o: nothing is missing"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each back end of the CPU, named for the test."""
    with mlx_h2o.use_backend(request.param):
        yield request.param


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    """The embedded model and its tokenizer."""
    return mlx_h2o.load("demo")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model, to change."""
    return shutil.copytree(model_path(), tmp_path / "model")


@pytest.fixture
def mlx_lm_stays_as_it_is() -> Iterator[None]:
    """Around a test: it leaves mlx_lm as it was."""
    with importlib.import_module("routing_checks").mlx_lm_stays_as_it_is():
        yield
