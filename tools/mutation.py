"""Mutants: one place of the package changed at a time, and whether a test notices.

    python tools/mutation.py [FILE ...] [--sample 150] [--seed 0] [--lines FILE] [--json FILE]

The changes are cosmic-ray's operators, one drawn for each place in a function that some of them can
change. All happens in one process, in which the code of the function is exchanged: to start one for
each mutant takes longer than its tests, and mutmut's forks wait forever where MLX has computed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import gc
import itertools
import json
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import coverage
import pytest
from _pytest.runner import runtestprotocol
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "python/mlx_h2o"
ROOMS = tuple(f"{PACKAGE}/{room}" for room in ("policies", "caches", "operations"))
SUITES = ("operations", "caches", "golden", "lm", "serving", "gpu", "parity")
SECONDS = 120


class Mutant(NamedTuple):
    """A change: its file, line and operator, and the file as it would be."""

    file: str
    line: int
    operator: str
    text: str


def changeable(text: str) -> Iterator[tuple[tuple[int, int], str, int]]:
    """The places, operators and occurrences of cosmic-ray within functions, but for types.

    Nor is a comparison made one of identity: small integers are the same objects.
    """
    bodies, ignored = [], []
    for node in ast.walk(ast.parse(text)):
        parts = [getattr(node, name, None) for name in ("annotation", "returns")]
        ignored += [span for one in parts if one is not None for span in [_span(one, one)]]
        if isinstance(node, ast.FunctionDef):
            bodies.append(_span(node.body[0], node.body[-1]))
            ignored.append((_span(node, node)[0], bodies[-1][0]))  # the signature
    nodes = [*ast_nodes(get_ast(text))]
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments() or name.endswith(("_Is", "_IsNot")):
            continue
        starts = (start for node in nodes for start, _ in operator().mutation_positions(node))
        for occurrence, start in enumerate(starts):
            within = any(first <= start < last for first, last in bodies)
            if within and not any(first <= start < last for first, last in ignored):
                yield start, name, occurrence


def _span(first: Any, last: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    return (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)


def mutants(files: list[Path], sample: int, seed: int) -> tuple[list[Mutant], Counter[str]]:
    """So many, each of another place, and how many places each file has."""
    drawn, places = random.Random(seed), []
    for file in files:
        text, operators = file.read_text("utf-8"), defaultdict(list)
        for start, *operator in changeable(text):
            operators[start].append(operator)
        places += [(file, text, start, operators[start]) for start in sorted(operators)]
    found = []
    for file, text, (line, _), operators in drawn.sample(places, min(sample, len(places))):
        name, occurrence = drawn.choice(operators)
        changed = mutate_code(text, get_operator(name)(), occurrence)
        found.append(Mutant(str(file.relative_to(ROOT)), line, name.split("/")[-1], changed))
    return found, Counter(str(file.relative_to(ROOT)) for file, *_ in places)


def functions_of(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """The code of each function of a module, by its name and line."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield (one.co_qualname, one.co_firstlineno), one
            yield from functions_of(one)


@contextmanager
def exchanged(mutant: Mutant) -> Iterator[None]:
    """The package with a mutant's code in its functions."""
    file = str(ROOT / mutant.file)
    code = dict(functions_of(compile(mutant.text, file, "exec", dont_inherit=True)))
    changed = []
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename.endswith(mutant.file):
            before = one.__code__
            after = code.get((before.co_qualname, before.co_firstlineno), before)
            if after != before and len(after.co_freevars) == len(before.co_freevars):
                changed.append((one, before))
                one.__code__ = after
    if not changed:
        raise SystemExit(f"[mutation] {mutant.file}:{mutant.line} is in no function that is there")
    try:
        yield
    finally:
        for one, before in changed:
            one.__code__ = before


class Lines:
    """Which tests run which lines, of pytest's session or of a file of coverage."""

    def __init__(self, file: Path) -> None:
        self._file, self._of = file, defaultdict(lambda: defaultdict(set))
        self._length: Counter[str] = Counter()

    def read(self) -> None:
        data = coverage.CoverageData(str(self._file))
        data.read()
        for name in data.measured_files():
            file = name[name.rindex(PACKAGE) :]
            for line, tests in data.contexts_by_lineno(name).items():
                self._of[file][line] |= {*tests} - {""}
                self._length.update(tests)

    def record(self, session: pytest.Session) -> None:
        settings = self._file.with_suffix(".ini")
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text("[run]\ndynamic_context=test_function\n")
        sources = [str(ROOT / room) for room in ROOMS]
        recorded = coverage.Coverage(self._file, config_file=str(settings), source=sources)
        with recorded.collect():
            wrong = [item.nodeid for item in session.items if fails(item)]
        if wrong:
            raise SystemExit(f"[mutation] tests fail as it is: {wrong}")

    def tests(self, mutant: Mutant) -> list[str]:
        """The names of tests that run the line, those first that run the fewest lines."""
        found = self._of[mutant.file][mutant.line]
        return sorted(found, key=lambda test: (self._length[test], test))


def fails(item: pytest.Item) -> bool:
    """Whether a test fails now, or takes too long."""

    def too_long(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        return any(one.failed for one in runtestprotocol(item, log=False, nextitem=None))
    except TimeoutError:
        return True
    finally:
        signal.alarm(0)


class Mutation:
    """A plugin of pytest: the mutants in the place of its loop over the tests."""

    def __init__(self, chosen: list[Mutant], given: argparse.Namespace) -> None:
        self._chosen, self._given, self._lines = chosen, given, Lines(given.lines)
        self.results: list[tuple[Mutant, str]] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if not self._given.lines.exists():
            self._lines.record(session)
        self._lines.read()
        items = defaultdict(list)
        for item in session.items:
            name = getattr(item, "originalname", item.name)
            items[f"{item.module.__name__}.{name}"].append(item)
        end = time.monotonic() + 60 * self._given.minutes
        for mutant in self._chosen:
            if time.monotonic() > end:
                break
            # One setting of each test, then a second one, and so on.
            names = self._lines.tests(mutant)
            rounds = itertools.zip_longest(*(items[name] for name in names))
            tests = [item for one in rounds for item in one if item is not None]
            said = self._fate(mutant, tests[: self._given.most])
            self.results.append((mutant, said))
            print(f"{mutant.file}:{mutant.line} {mutant.operator}: {said}", flush=True)
        return True

    def _fate(self, mutant: Mutant, tests: list[pytest.Item]) -> str:
        """Which test notices; that must pass without the mutant, or what is left of it lies about
        the next ones."""
        with exchanged(mutant):
            noticed = next(filter(fails, tests), None)
        if noticed is None:
            return f"survived {len(tests)} tests"
        if fails(noticed):
            raise SystemExit(f"[mutation] {mutant.file}:{mutant.line} leaves something behind")
        return f"killed by {noticed.nodeid}"


def change_of(mutant: Mutant) -> list[str]:
    """The lines that go, and those that come."""
    before = (ROOT / mutant.file).read_text("utf-8").splitlines()
    lines = difflib.unified_diff(before, mutant.text.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def summary(
    results: list[tuple[Mutant, str]], places: Counter[str], given: argparse.Namespace
) -> dict[str, Any]:
    tried = Counter(mutant.file for mutant, _ in results)
    killed = Counter(mutant.file for mutant, said in results if said.startswith("killed"))
    return {
        "date": f"{date.today()}",
        "cosmic_ray": version("cosmic-ray"),
        "seed": given.seed,
        "tests_of_a_mutant": given.most,
        "places": places.total(),
        "mutants": tried.total(),
        "killed": killed.total(),
        "score": round(killed.total() / max(1, tried.total()), 3),
        "files": {
            file: {"places": places[file], "mutants": count, "killed": killed[file]}
            for file, count in sorted(tried.items())
        },
        "survivors": [
            {"file": one.file, "line": one.line, "change": change_of(one), "looked_at": ""}
            for one, said in results
            if not said.startswith("killed")
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / room for room in ROOMS])
    parser.add_argument("--sample", type=int, default=150, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn")
    parser.add_argument("--most", type=int, default=400, help="tests that one mutant meets")
    parser.add_argument("--minutes", type=float, default=600, help="then no other one is tried")
    parser.add_argument("--suites", default=",".join(SUITES), help="folders of tests/")
    recorded = ROOT / "reports" / "mutation.coverage"
    parser.add_argument("--lines", type=Path, default=recorded, help="which tests run which lines")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    files = [
        file
        for path in (path.resolve() for path in given.files)
        for file in (sorted(path.rglob("*.py")) or [path])
    ]
    chosen, places = mutants(files, given.sample, given.seed)
    plugin = Mutation(chosen, given)
    suites = [str(ROOT / "tests" / name) for name in given.suites.split(",")]
    pytest.main(["-q", "-p", "no:cacheprovider", *suites], plugins=[plugin])
    result = summary(plugin.results, places, given)
    print(f"{result['killed']} of {result['mutants']} killed: {result['score']:.1%}")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
