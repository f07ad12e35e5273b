"""A public name of the package means one thing: each is defined once, and file names are unique."""

import symtable
from collections import defaultdict
from pathlib import Path

import mlx_h2o
from project.test_walls import GENERATED

BACK_ENDS = ("fast.py", "composed", "gpu", "native")
"""Each has an operation under its name, once."""
SHARED = {
    *("__init__.py", "__main__.py"),  # Python's names
    *("generate.py", "layers.py", "plan.py"),  # of lm/, and the command that shows it
    *("parser", "run"),  # of each command
    "main",  # of what ``python -m`` runs
    "BACKEND",  # what a back end brings
    "evicting",  # for mlx_lm's models, and for mlx-vlm's
}


def found_twice(package: Path) -> dict[str, list[str]]:
    """The files of each name that means more than one thing."""
    files: dict[str, list[str]] = defaultdict(list)
    for file in package.rglob("*.py"):
        if file.name in GENERATED:
            continue
        files[file.name].append(path := str(file.relative_to(package)))
        for name in symtable.symtable(file.read_text("utf-8"), path, "exec").get_symbols():
            if name.is_assigned() and not name.is_imported() and name.get_name()[0] != "_":
                homes = (one for one in BACK_ENDS if one in file.relative_to(package).parts)
                files[name.get_name()].append(next(homes, path))
    # One thing has one home, or one in each of some back ends.
    return {n: one for n, one in files.items() if len(one) not in (1, len({*one} & {*BACK_ENDS}))}


def test_each_name_means_one_thing() -> None:
    found = found_twice(Path(mlx_h2o.__file__).parent)
    assert {name: found.get(name) for name in found.keys() ^ SHARED} == {}
