"""Write the table of operations, metal/operations.toml, as a Python module and a C++ header."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTICE = "Generated from metal/operations.toml by tools/package_kernels.py; do not edit."
KINDS = ("array", "mask", "rows", "number", "integer", "per_sequence", "one_of")


def read_operations(metal: Path) -> dict[str, dict[str, Any]]:
    """For each operation, its arguments by name and the rules of its "sizes"."""
    return tomllib.loads((metal / "operations.toml").read_text("ascii"))


def python_module(operations: dict[str, dict[str, Any]]) -> str:
    """`python/mlx_h2o/operations/_operation_table.py`, which `arguments.py` reads."""
    parts = [f'"""{NOTICE}"""\n\n', _PYTHON_TYPES, "OPERATIONS: dict[str, Operation] = {\n"]
    for name, arguments in operations.items():
        lines = []
        for fields in _arguments(arguments):
            given = ", ".join(f"{field}={value!r}" for field, value in fields.items() if value)
            lines.append(f"        Argument({given}),\n")
        parts.append(f"    {name!r}: Operation((\n{''.join(lines)}    ), {_rules(arguments)!r}),\n")
    return "".join([*parts, "}\n"])


def _arguments(operation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The fields of each argument."""
    for name, given in operation.items():
        if name == "sizes":
            continue
        kind, what = next((kind, given[kind]) for kind in KINDS if kind in given)
        dtype, _, layout = what.partition(" ") if isinstance(what, str) else ("", "", "")
        yield {
            "name": name, "called": given.get("python", name), "kind": kind, "dtype": dtype,
            "sizes": tuple(layout[1:-1].split(", ")) if layout else (),
            "scales": given.get("scales", ""), "bits": given.get("bits", ""),
            "optional": "default" in given,
            "bounds": tuple(what.items()) if isinstance(what, dict) else (),
            "values": tuple(what) if kind == "one_of" else (),
        }  # fmt: skip


def _rules(operation: dict[str, Any]) -> tuple[tuple[str, str, str | int], ...]:
    """More rules for the sizes: a size, its relation, and another size or a number."""
    split = (rule.split() for rule in operation.get("sizes", ()))
    return tuple(
        (first, relation, int(second) if second.isdigit() else second)
        for first, *_, relation, second in split
    )


def cpp_header(operations: dict[str, dict[str, Any]]) -> str:
    """`core/src/cpu/operation_table.h`, which `arguments.cpp` there reads."""
    parts = [f"// {NOTICE}\n// clang-format off\n#pragma once\n\n", _CPP_TYPES]
    rows = []
    for name, arguments in operations.items():
        names: list[str] = []  # of sizes, which the header refers to by index
        lines = []
        for fields in _arguments(arguments):
            names += [size for size in fields["sizes"] if size not in names]
            lines.append(_cpp_argument(fields, names))
        rules = []
        for first, relation, second in _rules(arguments):
            limit, size = (second, -1) if isinstance(second, int) else (0, names.index(second))
            word = "at" if relation == "most" else relation
            rules.append(f"{{{names.index(first)}, Relation::{word}, {size}, {limit}}}")
        parts.append(f"inline constexpr Argument {name}_arguments[] = {{\n{''.join(lines)}}};\n")
        own = f"{name}_arguments"
        listed = ", ".join(f'"{size}"' for size in names)
        rows.append(
            f'    {{"{name}", {own}, std::size({own}), {{{listed}}}, '
            f"{{{', '.join(rules)}}}, {len(rules)}}},\n"
        )
    parts.append(f"inline constexpr Operation operations[] = {{\n{''.join(rows)}}};\n\n")
    return "".join([*parts, "}  // namespace mlx_h2o::table\n"])


def _cpp_argument(given: dict[str, Any], names: list[str]) -> str:
    bounds, sizes = dict(given["bounds"]), given["sizes"]
    layout = f"[{', '.join(sizes)}]" if sizes else ""
    numbers = ", ".join(
        "none" if isinstance(value := bounds.get(side), str | None) else repr(float(value))
        for side in ("least", "above", "most", "below")
    )
    size = next((names.index(value) for value in bounds.values() if isinstance(value, str)), -1)
    name = given["called" if given["kind"] == "integer" else "name"]
    fields = (
        f'"{name}", Kind::{given["kind"]}, "{given["dtype"]}", "{layout}"',
        f"{{{', '.join(str(names.index(size)) for size in sizes)}}}, {len(sizes)}",
        f'"{given["scales"]}", {str(given["optional"]).lower()}',
        f'{{{numbers}}}, {size}, "{", ".join(map(repr, given["values"]))}"',
    )
    return f"    {{{', '.join(fields)}}},\n"


_PYTHON_TYPES = '''from typing import Any, NamedTuple


class Argument(NamedTuple):
    """An argument, as metal/operations.toml explains it; ``called`` is its name in ``fast``."""

    name: str
    called: str
    kind: str
    dtype: str = ""
    sizes: tuple[str, ...] = ()
    scales: str = ""
    bits: str = ""
    optional: bool = False
    bounds: tuple[tuple[str, Any], ...] = ()
    values: tuple[Any, ...] = ()

    @property
    def layout(self) -> str:
        return f"[{', '.join(self.sizes)}]"


class Operation(NamedTuple):
    """Arguments in order, and rules: a size, its relation, and another size or a number."""

    arguments: tuple[Argument, ...]
    rules: tuple[tuple[str, str, str | int], ...]


'''

_CPP_TYPES = f"""#include <cstddef>
#include <iterator>
#include <limits>

namespace mlx_h2o::table {{

enum class Kind {{ {", ".join(KINDS)} }};
enum class Relation {{ divides, at, below }};

inline constexpr double none = std::numeric_limits<double>::quiet_NaN();

struct Bounds {{
  double least, above, most, below;
}};

// metal/operations.toml explains them. Sizes are numbers of names of the operation; `most` is that
// of a size which bounds an integer, or -1.
struct Argument {{
  const char* name;
  Kind kind;
  const char* dtype;
  const char* layout;
  int sizes[4];
  int rank;
  const char* scales;
  bool optional;
  Bounds bounds;
  int most;
  const char* values;
}};

// Of two sizes, or of one and a limit.
struct Rule {{
  int first;
  Relation relation;
  int second, limit;
}};

struct Operation {{
  const char* name;
  const Argument* arguments;
  size_t count;
  const char* sizes[8];
  Rule rules[2];
  size_t rule_count;
}};

"""
