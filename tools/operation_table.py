"""Write the table of operations, metal/operations.toml, as a Python module and a C++ header."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

NOTICE = "Generated from metal/operations.toml by tools/package_kernels.py; do not edit."
KINDS = ("array", "mask", "rows", "number", "integer", "per_sequence", "one_of")


def read_operations(metal: Path) -> dict[str, dict[str, Any]]:
    """For each operation, its arguments by name and the rules of its "sizes"."""
    return tomllib.loads((metal / "operations.toml").read_text("ascii"))


def python_module(operations: dict[str, dict[str, Any]]) -> str:
    """`python/mlx_h2o/operations/_operation_table.py`, which `arguments.py` reads."""
    parts = [f'"""{NOTICE}"""\n\nfrom typing import Any\n\n']
    parts.append("OPERATIONS: dict[str, dict[str, Any]] = {\n")
    for name, arguments in operations.items():
        lines = "".join(f"        {key!r}: {value!r},\n" for key, value in arguments.items())
        parts.append(f"    {name!r}: {{\n{lines}    }},\n")
    return "".join([*parts, "}\n"])


def cpp_header(operations: dict[str, dict[str, Any]]) -> str:
    """`core/src/cpu/operation_table.h`, which `arguments.cpp` there reads."""
    parts = [f"// {NOTICE}\n// clang-format off\n#pragma once\n\n", _CPP_TYPES]
    rows = []
    for name, arguments in operations.items():
        names: list[str] = []  # of sizes, which the header refers to by index
        lines = []
        for argument, given in arguments.items():
            if argument != "sizes":
                lines.append(_cpp_argument(argument, given, names))
        rules = []
        for rule in arguments.get("sizes", ()):
            first, relation, *_, second = rule.split()
            limit, size = (second, -1) if second.isdigit() else (0, names.index(second))
            rules.append(f"{{{names.index(first)}, Relation::{relation}, {size}, {limit}}}")
        parts.append(f"inline constexpr Argument {name}_arguments[] = {{\n{''.join(lines)}}};\n")
        own = f"{name}_arguments"
        listed = ", ".join(f'"{size}"' for size in names)
        rows.append(
            f'    {{"{name}", {own}, std::size({own}), {{{listed}}}, '
            f"{{{', '.join(rules)}}}, {len(rules)}}},\n"
        )
    parts.append(f"inline constexpr Operation operations[] = {{\n{''.join(rows)}}};\n\n")
    return "".join([*parts, "}  // namespace mlx_h2o::table\n"])


def _cpp_argument(name: str, given: dict[str, Any], names: list[str]) -> str:
    kind, what = next((kind, given[kind]) for kind in KINDS if kind in given)
    dtype, _, layout = what.partition(" ") if isinstance(what, str) else ("", "", "")
    sizes = layout[1:-1].split(", ") if layout else []
    names += [size for size in sizes if size not in names]
    bounds = what if isinstance(what, dict) else {}
    numbers = ", ".join(
        "none" if isinstance(value := bounds.get(side), str | None) else repr(float(value))
        for side in ("least", "above", "most", "below")
    )
    size = next((names.index(value) for value in bounds.values() if isinstance(value, str)), -1)
    called = given["python"] if kind == "integer" and "python" in given else name
    values = ", ".join(map(repr, what)) if kind == "one_of" else ""
    fields = (
        f'"{called}", Kind::{kind}, "{dtype}", "{layout}"',
        f"{{{', '.join(str(names.index(size)) for size in sizes)}}}, {len(sizes)}",
        f'"{given.get("scales", "")}", {str("default" in given).lower()}',
        f'{{{numbers}}}, {size}, "{values}"',
    )
    return f"    {{{', '.join(fields)}}},\n"


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
