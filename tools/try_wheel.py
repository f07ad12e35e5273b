"""Run the README's commands and its Python with the package as it is installed here.

An argument names the back end that must serve it.
"""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import mlx_h2o

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    """The README's blocks of code in a language."""
    text = README.read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def main(wanted: str = "") -> None:
    """Raises an error if a command fails, or another back end serves."""
    (status,) = (each for each in mlx_h2o.backends().values() if each.default)
    if wanted not in ("", status.name):
        sys.exit(f"the back end is {status.name}, expected {wanted}: {mlx_h2o.backends()}")
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("mlx_h2o ")]
    commands += [[sys.executable, "-c", code] for code in blocks("python")]
    for command in commands:
        began = time.monotonic()
        subprocess.run(command, check=True)
        print(f"[{time.monotonic() - began:.1f} s: {' '.join(command)[:60]!r}]", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
