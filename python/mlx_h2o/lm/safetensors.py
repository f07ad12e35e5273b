"""A safetensors file, before MLX maps it: is all of it there, and is it what was written?

MLX reads arrays when they are evaluated; by then a truncated file would fail far from its cause.
The checksum in its own header shows damage, and is no signature: it is the SHA-256 of all bytes of
the file, those of the checksum itself taken as zeros.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

UNKNOWN = "0" * 64
"""What stands for a checksum until it is known."""

_LONGEST = 100_000_000  # the format's own limit of a header
_PART = 1 << 20


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


def write_checksum(path: str | os.PathLike[str], entry: str) -> None:
    """Put the checksum of a file into a text of its metadata, ``entry``, where UNKNOWN stands."""
    place = _place(path, entry, UNKNOWN)
    found = _of_file(path, place).encode()
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(found)


def is_whole(path: str | os.PathLike[str], entry: str, checksum: str) -> bool:
    """Whether a file is as it was written; ``entry`` is the text of its metadata that holds the
    ``checksum``. Reads all of it."""
    if len(checksum) != len(UNKNOWN):
        return False
    try:
        return _of_file(path, _place(path, entry, checksum)) == checksum
    except ValueError:  # others have written the header anew
        return False


def _place(path: str | os.PathLike[str], entry: str, checksum: str) -> int:
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    text = json.dumps(entry)[1:-1].encode()  # as a string of JSON
    return 8 + header.index(text) + text.index(checksum.encode())


def _of_file(path: str | os.PathLike[str], place: int) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        found.update(file.read(place))
        file.seek(len(UNKNOWN), os.SEEK_CUR)
        found.update(UNKNOWN.encode())
        while part := file.read(_PART):
            found.update(part)
    return found.hexdigest()
