"""Files: check before the work that they can be written, name them in errors, and check that they
are whole.

MLX reads the arrays of a safetensors file when they are evaluated; by then a truncated file would
fail far from its cause. The checksum in the header detects damage, but is not a signature: it is
the SHA-256 of all bytes of the file, with zeros in place of the checksum itself.
"""

import contextlib
import errno
import hashlib
import mmap
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

UNKNOWN = "0" * 64
"""Stands for a checksum until it is known."""

_BEFORE = rb"\"checksum\": \""
"""The text before a checksum, whose quotes are escaped: metadata is JSON within JSON."""


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within the context, every error in writing becomes an OSError that names this file."""
    try:
        yield
    except OSError as error:
        if not error.errno:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    except RuntimeError as error:  # MLX's, which has no errno
        raise OSError(errno.EIO, f"cannot be written: {error}", os.fspath(path)) from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises OSError if no file can be written there, the disk is full or a folder is in the way.
    An existing file is not changed. Links are followed, also to files that are not there yet."""
    with writing(Path(path)):
        path = Path(os.path.realpath(path))
        if path.exists():
            path.open("ab").close()
        if path.is_file() or not path.exists():
            with tempfile.TemporaryFile(dir=path.parent) as file:
                file.write(bytes(1 << 16))


def check_folder(path: str) -> None:
    """Raises OSError unless this folder can be written to; makes a missing one, for this user."""
    with writing(path):
        with contextlib.suppress(FileExistsError):  # if it is a file, the next line says so
            os.makedirs(path, mode=0o700)
        tempfile.TemporaryFile(dir=path).close()


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, suffix: str = "") -> Iterator[Path]:
    """A temporary file that replaces ``path`` at the end; after an error it is removed."""
    real = Path(os.path.realpath(path))  # links stay, and names have at most 255 bytes
    beside = real.with_name(f".{real.name[:51]}.{uuid.uuid4().hex}{suffix}")
    with writing(path):
        try:
            beside.touch(mode, exist_ok=False)
            yield beside
            beside.replace(real)
        finally:
            beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all; a device or a pipe is written to in place."""
    in_place = path.exists() and not path.is_file()
    with writing(path) if in_place else replacing(path) as beside:
        (beside or path).write_text(text, encoding="utf-8")


def texts_of(path: str, op: str, what: str = "prompt cache") -> dict[str, str]:
    """The metadata of a safetensors file; its arrays are not read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a safetensors file, or one whose size is not what its header says.
    """
    try:
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            raise SafetensorError("it is a device or a pipe")  # to open a pipe may take forever
        with open(path, "rb"), safe_open(path, "np") as file:  # open's error names a folder
            return dict(file.metadata() or {})
    except SafetensorError as error:
        said = f"{path} is damaged or no safetensors file, expected a {what}: {error}."
        raise ValueError(f"[{op}] {said}") from error


def write_checksum(path: str | os.PathLike[str]) -> None:
    """Write the checksum of a file in place of UNKNOWN."""
    with open(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            place, found = data.find(_BEFORE + UNKNOWN.encode()), hashlib.sha256(data).hexdigest()
        file.seek(place + len(_BEFORE))
        file.write(found.encode())


def is_whole(path: str | os.PathLike[str], checksum: str) -> bool:
    """Whether a file still has this checksum. Reads all of it."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
        place = data.find(_BEFORE + checksum.encode()) + len(_BEFORE)
        data[place : place + len(checksum)] = b"0" * len(checksum)
        return hashlib.sha256(data).hexdigest() == checksum
