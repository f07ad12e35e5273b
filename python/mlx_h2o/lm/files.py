"""Files that are written: whether one can be, before the work, and which it is, where it fails."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["check_folder", "check_writable", "replacing", "write_text"]


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within the context every error in writing is an OSError that names this file."""
    try:
        yield
    except OSError as error:
        if not error.errno:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    except RuntimeError as error:  # of MLX, which says no more
        raise OSError(errno.EIO, f"cannot be written: {error}", os.fspath(path)) from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises OSError where no file can be written there, the disk is full or a folder is in the
    way. What is there stays as it is."""
    path = Path(path)
    with writing(path):
        if path.exists():
            path.open("ab").close()
        if path.is_file() or not path.exists():
            with tempfile.TemporaryFile(dir=path.parent) as file:
                file.write(bytes(1 << 16))


def check_folder(path: str) -> None:
    """Raises OSError where this is no folder that can be written to; one that is missing is made,
    for this user alone."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    tempfile.TemporaryFile(dir=path).close()


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, suffix: str = "") -> Iterator[Path]:
    """A new file, which takes the place of ``path`` once it was written, or goes."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}{suffix}")
    with writing(path):
        try:
            beside.touch(mode, exist_ok=False)
            yield beside
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all, or to a device that is there."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        with writing(path):
            path.write_text(text, encoding="utf-8")
        return
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")
