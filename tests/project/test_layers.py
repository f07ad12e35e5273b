"""The folders of the package import in one direction, and its modules without cycles."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import mlx_h2o

PACKAGE = Path(mlx_h2o.__file__).parent
LAYERS = ["errors", "version", "blas", "_kernel_text", "operations", "fast", "policies", "config"]
LAYERS += ["caches", "demo", "lm", "vlm", "evaluation", "serving", "commands", "hardware", "cli"]
LAYERS += ["__main__"]


def loaded(tree: ast.Module, folder: list[str]) -> Iterator[list[str]]:
    """What a file may import by name: its texts that name a module, from the package or from its
    folder on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            first, *rest = node.value.split(".")
            if rest and first in ("", folder[0]):
                yield [*(folder if first == "" else [first]), *rest]


def names(tree: ast.Module, folder: list[str]) -> Iterator[list[str]]:
    """The parts of every name that a file in this folder of the package imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            yield from ([*base, alias.name] for alias in node.names)


def imports(package: Path) -> dict[str, set[str]]:
    """The modules of a package that each of them imports, at once, in a function, for types alone
    or by name.

    The packages above a module that is imported do not count.
    """
    files = {}
    for file in package.rglob("*.py"):
        parts = [package.name, *file.relative_to(package).with_suffix("").parts]
        files[".".join(parts).removesuffix(".__init__")] = file
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        tree = ast.parse(file.read_text())
        folder = [package.name, *file.relative_to(package).parts[:-1]]
        given = [(".".join(name), ".".join(name[:-1])) for name in names(tree, folder)]
        # The last part is a module, or what a module holds.
        found[module] = {whole if whole in files else above for whole, above in given}
        found[module] |= {".".join(name) for name in loaded(tree, folder)}
        found[module] &= files.keys()
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules each of which imports the next, the last one the first; empty where there is none."""
    done: set[str] = set()

    def follow(path: list[str]) -> list[str]:
        for module in sorted(graph[path[-1]] - done):
            if module in path:
                return path[path.index(module) :]
            if found := follow([*path, module]):
                return found
        done.add(path[-1])
        return []

    return next(filter(None, (follow([module]) for module in sorted(graph))), [])


def test_a_part_imports_only_from_those_before_it() -> None:
    """But what ``python -m`` runs, which nothing imports; each part has its place here."""
    graph = imports(PACKAGE)
    height = {module: LAYERS.index(module.split(".")[1]) for module in graph if "." in module}
    run = {module for module in height if module.endswith("__main__")}
    back = [
        (module, other)
        for module in height.keys() - run
        for other in graph[module] & height.keys()
        if height[other] > height[module] or other in run
    ]
    assert back == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = imports(PACKAGE)
    assert "mlx_h2o.operations.backends" in graph["mlx_h2o.fast"]
    assert circle(graph) == []


CIRCLES = {
    "at once": ("from .b import work", "import package.a", True),
    "by name": ("from . import b", "from package import a", True),
    "in a function": ("from .b import work", "def work():\n    from .a import other", True),
    "of one": ("from . import a", "", True),
    "for types alone": ("from .b import work", "if TYPE_CHECKING:\n    from . import a", True),
    "by a text": ("from .b import work", 'import importlib\nimportlib.import_module(".a")', True),
    "none": ("from .b import work", "import a", False),
}


@pytest.mark.parametrize("kind", CIRCLES)
def test_a_circle_is_found(kind: str, tmp_path: Path) -> None:
    first, second, expected = CIRCLES[kind]
    package = tmp_path / "package"
    package.mkdir()
    for name, text in (("__init__", "from . import c"), ("a", first), ("b", second), ("c", "")):
        (package / f"{name}.py").write_text(text)
    assert bool(circle(imports(package))) is expected
