"""Write the golden vectors: ``python -m golden.make [FILE]``, tests/ and tests/lib on the path."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx

from golden.build import Case
from golden.cases import golden_cases

FILE = Path(__file__).with_name("cases.safetensors")
VERSION = "1"


def write(path: Path, cases: Iterable[Case]) -> None:
    """One safetensors file: tensors "<case>/<name>", fields as JSON in the metadata."""
    tensors, fields = {}, []
    for case in cases:
        fields.append(case.fields)
        tensors |= {f"{case.name}/{key}": array for key, array in case.tensors.items()}
    metadata = {"version": VERSION, "cases": json.dumps(fields)}
    mx.save_safetensors(str(path), tensors, metadata)


def read(path: Path = FILE) -> list[Case]:
    """The cases of a file, in its order."""
    tensors, metadata = mx.load(str(path), return_metadata=True)
    if metadata.get("version") != VERSION:
        raise ValueError(f"{path} has version {metadata.get('version')!r}, expected {VERSION!r}")
    own: dict[str, dict[str, mx.array]] = {}
    for key, array in tensors.items():
        name, _, tensor = key.rpartition("/")
        own.setdefault(name, {})[tensor] = array
    return [Case(fields, own[fields["name"]]) for fields in json.loads(metadata["cases"])]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    write(target, golden_cases())
    print(f"{target}: {target.stat().st_size} bytes")
