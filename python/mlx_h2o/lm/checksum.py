"""A checksum of a safetensors file in its own header: it shows damage, and is no signature.

It is the SHA-256 of all bytes of the file, those of the checksum itself taken as zeros.
"""

from __future__ import annotations

import hashlib
import json
import os

__all__ = ["UNKNOWN", "is_whole", "write_checksum"]

UNKNOWN = "0" * 64
"""What stands for a checksum until it is known."""

_PART = 1 << 20


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
