"""Mutants: one place of the package changed at a time, and whether a test notices.

    python tools/mutation.py [FILE ...] [--sample 150] [--seed 0] [--lines FILE] [--json FILE]

The changes are cosmic-ray's operators; for each place in a function that some operators can change,
one is drawn. One process tries many mutants by exchanging the code of functions: starting a process
for each would take longer than its tests, and mutmut's forks hang once MLX has computed. If a
mutant ends the process or leaves something behind, a new process continues.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import gc
import itertools
import json
import random
import signal
import subprocess
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
import hypothesis
import pytest
from _pytest.runner import runtestprotocol
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from mlx_h2o.operations import backends

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "python/mlx_h2o"
ROOMS = tuple(f"{PACKAGE}/{room}" for room in ("policies", "caches", "operations"))
SUITES = ("operations", "caches", "golden", "lm", "serving", "gpu", "parity")
SECONDS = 60


class Mutant(NamedTuple):
    """A change: its file, line and operator, and the changed text of the file."""

    file: str
    line: int
    operator: str
    text: str


def changeable(text: str) -> Iterator[tuple[tuple[int, int], str, int]]:
    """cosmic-ray's places, operators and occurrences within functions, except in annotations.

    Comparisons do not become identity tests either: small integers are the same objects.
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
    """``sample`` mutants, each at a different place, and the number of places in each file."""
    drawn, places = random.Random(seed), []
    for file in files:
        text, operators = file.read_text("utf-8"), defaultdict(list)
        for start, *operator in changeable(text):
            operators[start].append(operator)
        places += [(file, text, start, operators[start]) for start in sorted(operators)]
    found = []
    for file, text, (line, _), operators in drawn.sample(places, len(places)):
        name, occurrence = drawn.choice(operators)
        changed = mutate_code(text, get_operator(name)(), occurrence)
        if compile(changed, "", "exec") != compile(text, "", "exec"):  # equal by constant folding
            found.append(Mutant(str(file.relative_to(ROOT)), line, name.split("/")[-1], changed))
        if len(found) == sample:
            break
    return found, Counter(str(file.relative_to(ROOT)) for file, *_ in places)


def functions_of(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """The code of each function of a module, by its name and line."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield (one.co_qualname, one.co_firstlineno), one
            yield from functions_of(one)


@contextmanager
def exchanged(mutant: Mutant) -> Iterator[None]:
    """The package with a mutant's code in its functions, and with empty caches."""
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
    forget()
    try:
        yield
    finally:
        for one, before in changed:
            one.__code__ = before
        forget()


def forget() -> None:
    """Empty the caches of the package's functions."""
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("mlx_h2o.")]
    for one in [one for module in modules for one in module.values()]:
        if isinstance(one, functools._lru_cache_wrapper):
            one.cache_clear()
    backends.forget()


class Lines:
    """Which tests run which lines, from a coverage file."""

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
        self._file.parent.mkdir(parents=True, exist_ok=True)
        sources = [str(ROOT / room) for room in ROOMS]
        recorded, wrong = coverage.Coverage(self._file, config_file=False, source=sources), []
        with recorded.collect():
            for item in session.items:
                forget()
                recorded.switch_context(item.nodeid)
                wrong += [item.nodeid] if fails(item) else []
        if wrong:
            raise SystemExit(f"[mutation] tests fail as it is: {wrong}")
        recorded.save()

    def tests(self, mutant: Mutant) -> list[str]:
        """The names of tests that run the line: one setting of each test, then a second one, and so
        on; tests that run the fewest lines come first."""
        found = self._of[mutant.file][mutant.line]
        settings = defaultdict(list)
        for test in sorted(found, key=lambda test: (self._length[test], test)):
            settings[test.partition("[")[0]].append(test)
        rounds = itertools.zip_longest(*settings.values())
        return [test for one in rounds for test in one if test is not None]


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
    """A plugin of pytest that replaces its loop over the tests by one over mutants."""

    def __init__(self, chosen: list[Mutant], given: argparse.Namespace) -> None:
        self._chosen, self._given, self._lines = chosen, given, Lines(given.lines)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if not self._given.lines.exists():
            self._lines.record(session)
        self._lines.read()
        items = {item.nodeid: item for item in session.items}
        for mutant in self._chosen:
            tests = [items[name] for name in self._lines.tests(mutant) if name in items]
            said = self._fate(mutant, tests[: self._given.most], mutant is self._chosen[0])
            with self._given.fates.open("a") as file:
                file.write(f"{said}\n")
            print(f"{mutant.file}:{mutant.line} {mutant.operator}: {said}", flush=True)
        return True

    def _fate(self, mutant: Mutant, tests: list[pytest.Item], first: bool) -> str:
        """Which test notices. If it then fails without the mutant too, something was left behind:
        unless the mutant is the first of its process, a new process tries it again."""
        with exchanged(mutant):
            noticed = next(filter(fails, tests), None)
        if noticed is None:
            return f"survived {len(tests)} tests"
        if not first and fails(noticed):
            raise SystemExit(f"[mutation] {mutant.file}:{mutant.line}: again, in a new process")
        return f"killed by {noticed.nodeid}"


def fates(chosen: list[Mutant], given: argparse.Namespace) -> list[str]:
    """The fates of the mutants, tried in as many processes as it takes."""
    given.fates.unlink(missing_ok=True)
    end = time.monotonic() + 60 * given.minutes
    said: list[str] = []
    while len(said) < len(chosen) and time.monotonic() < end:
        command = [sys.executable, __file__, *sys.argv[1:], "--first", str(len(said))]
        try:
            status = subprocess.run(command, timeout=end - time.monotonic()).returncode
        except subprocess.TimeoutExpired:
            status = 0
        known = given.fates.read_text("utf-8").splitlines() if given.fates.exists() else []
        if len(known) == len(said) and status:  # the first mutant ended its process
            if not given.lines.exists():
                raise SystemExit("[mutation] no lines were recorded")
            with given.fates.open("a") as file:
                file.write(f"killed: the process ended with {status}\n")
        said = given.fates.read_text("utf-8").splitlines()
    return said


def change_of(mutant: Mutant) -> list[str]:
    """The removed lines and the added ones."""
    before = (ROOT / mutant.file).read_text("utf-8").splitlines()
    lines = difflib.unified_diff(before, mutant.text.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def function_at(text: str, line: int) -> str:
    """The innermost function around a line, whose name stays when lines move."""
    names: list[str] = []

    def around(node: Any) -> bool:  # some parts of a function have no lines
        return bool(getattr(node, "lineno", line) <= line <= getattr(node, "end_lineno", line))

    nodes: list[Any] = [ast.parse(text)]
    while nodes:
        nodes = [one for node in nodes for one in ast.iter_child_nodes(node) if around(one)]
        names += [one.name for one in nodes if isinstance(one, ast.FunctionDef | ast.ClassDef)]
    return ".".join(names)


def summary(
    results: list[tuple[Mutant, str]], places: Counter[str], given: argparse.Namespace
) -> dict[str, Any]:
    tried = Counter(mutant.file for mutant, _ in results)
    killed = Counter(mutant.file for mutant, said in results if said.startswith("killed"))
    return {
        "date": f"{date.today()}",
        "cosmic_ray": version("cosmic-ray"),
        "seed": given.seed,
        "suites": given.suites,
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
            {
                "file": one.file,
                "function": function_at((ROOT / one.file).read_text("utf-8"), one.line),
                "change": change_of(one),
                "looked_at": "",
            }
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
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)  # of a process's mutants
    given = parser.parse_args()
    files = [
        file
        for path in (path.resolve() for path in given.files)
        for file in (sorted(path.rglob("*.py")) or [path])
    ]
    chosen, places = mutants(files, given.sample, given.seed)
    given.fates = given.lines.with_suffix(".fates")
    if given.first is not None:
        suites = [str(ROOT / "tests" / name) for name in given.suites.split(",")]
        # One failing example is enough: finding the smallest takes minutes.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("brief", phases=phases, derandomize=True)
        hypothesis.settings.load_profile("brief")
        plugin = Mutation(chosen[given.first :], given)
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *suites], plugins=[plugin]))
    said = fates(chosen, given)
    result = summary(list(zip(chosen, said, strict=False)), places, given)
    print(f"{result['killed']} of {result['mutants']} killed: {result['score']:.1%}")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
