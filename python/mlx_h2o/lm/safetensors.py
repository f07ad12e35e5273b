"""The header of a safetensors file, read before MLX maps the file: is all of it there?

MLX reads arrays when they are evaluated; by then a truncated file would fail far from its cause.
"""

from __future__ import annotations

import json
import os
from typing import Any

_LONGEST = 100_000_000  # the format's own limit of a header


def read_header(path: str, op: str, what: str = "prompt cache") -> dict[str, Any]:
    """Name, dtype, shape and offsets of every array, and ``__metadata__``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a safetensors file, or one that is shorter or longer than it says.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= _LONGEST:
            raise ValueError(f"[{op}] {path} is no safetensors file, expected a {what}.")
        if size < 8 + length:
            raise _truncated(op, path, size, f"at least {8 + length}")
        text = file.read(length)
    try:
        header = json.loads(text)
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key[:2] != "__"]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        message = f"[{op}] {path} is no safetensors file, expected a {what}."
        raise ValueError(message) from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise _truncated(op, path, size, str(expected))
    assert isinstance(header, dict)
    return header


def _truncated(op: str, path: str, size: int, expected: str) -> ValueError:
    return ValueError(f"[{op}] {path} is damaged: found {size} bytes, expected {expected}.")
