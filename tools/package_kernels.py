"""Package the kernels and the table of operations of metal/ for Python and C.

    python tools/package_kernels.py           write the generated files
    python tools/package_kernels.py --check   fail if one is out of step

Needs Python 3.11 and nothing else.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from kernel_source import KernelSourceError, read_table
from kernel_writers import c_header, python_module
from operation_table import cpp_header, read_operations
from operation_table import python_module as operations_module

ROOT = Path(__file__).resolve().parent.parent


def generated_files(root: Path = ROOT) -> dict[str, str]:
    """The text of each generated file, by its path from the repository's root."""
    metal = root / "metal"
    table, operations = read_table(metal), read_operations(metal)
    return {
        "python/mlx_h2o/_kernel_text.py": python_module(table),
        "mlx-c/h2o/kernel_text.h": c_header(table),
        "python/mlx_h2o/operations/_operation_table.py": operations_module(operations),
        "core/src/cpu/operation_table.h": cpp_header(operations),
    }


def out_of_step(root: Path = ROOT) -> dict[str, str]:
    """The differences of generated files that do not match metal/, by path."""
    differences = {}
    for path, expected in generated_files(root).items():
        file = root / path
        found = file.read_text("utf-8") if file.exists() else ""
        if found != expected:
            lines = difflib.unified_diff(
                found.splitlines(),
                expected.splitlines(),
                f"{path} (found)",
                f"{path} (expected)",
                lineterm="",
            )
            differences[path] = "\n".join(lines)
    return differences


def main(arguments: list[str] | None = None) -> int:
    """Write or check the generated files; the exit status is 1 if a check fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a file is out of step"
    )
    options = parser.parse_args(arguments)
    try:
        if options.check:
            differences = out_of_step()
            for difference in differences.values():
                print(difference)
            if differences:
                print(f"out of step: {', '.join(differences)}; run python tools/package_kernels.py")
            return 1 if differences else 0
        for path, text in generated_files().items():
            file = ROOT / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    except KernelSourceError as error:
        print(f"package_kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
