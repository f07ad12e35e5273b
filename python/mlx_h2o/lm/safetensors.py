"""A safetensors file, before MLX maps it: is all of it there, and is it what was written?

MLX reads arrays when they are evaluated; by then a truncated file would fail far from its cause.
The checksum in its own header shows damage, and is no signature: it is the SHA-256 of all bytes of
the file, those of the checksum itself taken as zeros.
"""

from __future__ import annotations

import hashlib
import mmap
import os

from safetensors import SafetensorError, safe_open

UNKNOWN = "0" * 64
"""What stands for a checksum until it is known."""

_BEFORE = rb"\"checksum\": \""
"""What stands before a checksum: a text of the metadata is JSON in JSON."""


def texts_of(path: str, op: str, what: str = "prompt cache") -> dict[str, str]:
    """The metadata of a file, of which the arrays are not read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a safetensors file, or one that is shorter or longer than it says.
    """
    try:
        with safe_open(path, "np") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(
            f"[{op}] {path} is damaged or no safetensors file, expected a {what}: {error}."
        ) from error


def write_checksum(path: str | os.PathLike[str]) -> None:
    """Put the checksum of a file where UNKNOWN stands for it."""
    with open(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            place, found = data.find(_BEFORE + UNKNOWN.encode()), hashlib.sha256(data).hexdigest()
        file.seek(place + len(_BEFORE))
        file.write(found.encode())


def is_whole(path: str | os.PathLike[str], checksum: str) -> bool:
    """Whether a file is as it was written, with this checksum. Reads all of it."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
        place = data.find(_BEFORE + checksum.encode()) + len(_BEFORE)
        data[place : place + len(checksum)] = b"0" * len(checksum)
        return hashlib.sha256(data).hexdigest() == checksum
