"""Prompt caches on disk, found by their tokens, so that a restarted server reuses them.

An entry is a file of ``save_prompt_cache``, which appears whole or not at all. Its header holds
the tokens, and names the model with its settings.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..lm.files import check_folder
from ..lm.outline import total_bytes
from ..lm.saving import load_prompt_cache, save_prompt_cache, saved_texts
from .kept import Entry, Kept, key_of
from .snapshots import is_cuttable, trim_to

_LOG = logging.getLogger("mlx_h2o")
_ENTRY = re.compile(r"[0-9a-f]{32}\.prompt\.safetensors")  # other files are left alone
_SPARE = 1 << 24  # bytes of the disk that are left to others, and to headers of files
_DEAR = 16  # reading a token's rows takes a 16th of the time of computing them, or less
_BEGUN = re.compile(rf"\.{_ENTRY.pattern}\..+")  # being written, or left by a process that ended


class PromptStore:
    """A directory of prompt caches, bounded in bytes.

    The least recently used entry is removed first. A separate thread writes; it logs and drops a
    cache that it cannot write. Several processes can share a directory; ``known`` holds the
    entries that this process knows of.

    Args:
        folder: the directory; if it is missing, it is created for this user alone.
        max_bytes: of all files together, including those of other models and settings.
        of: names the model and the settings; entries of another name are not found.

    Attributes:
        pending: bytes of the caches that wait to be written.

    Raises:
        OSError: the directory cannot be created or written to.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, of: str) -> None:
        self.folder, self.max_bytes, self.of = Path(folder), max_bytes, of
        check_folder(os.fspath(folder))
        self._lock = threading.Lock()
        self.known = Kept[Path](share=0.5)  # accessed only under the lock
        self._look()
        self._shrink(max_bytes)
        self.pending = 0
        self._writer = ThreadPoolExecutor(1, "prompt store")

    def find(self, tokens: Sequence[int], more_than: int = 0) -> tuple[list[Any], int]:
        """The caches of the longest prefix of ``tokens`` that is worth reading, and its length,
        less than ``len(tokens)`` and more than ``more_than``; ([], 0) if there are none. Damaged
        entries are removed."""
        key, ahead = _key(self.of, tokens), len(_key(self.of, ())) // 4
        while True:
            with self._lock:
                gain = length = 0  # tokens, less what reading the rest of a longer entry costs
                for shared, one in self.known.nearest(key):
                    if shared - ahead <= gain:
                        break
                    served = one.serves(shared, len(key) // 4)
                    if (own := served - ahead - (len(one) - served) // _DEAR) > gain:
                        gain, length, found = own, served - ahead, one
                if not gain:
                    return [], 0
                self.known.use(found.key)
            try:
                with contextlib.suppress(OSError):  # of a disk that has become read-only
                    os.utime(found.content)  # also if memory has it: it counts as used
                if gain <= more_than:
                    return [], 0
                caches = load_prompt_cache(found.content)
                if not trim_to(caches, length):
                    raise ValueError("its rows cannot be trimmed")
                mx.eval([cache.state for cache in caches])  # before another process removes it
                return caches, length
            except (OSError, ValueError) as error:
                _refuse(found.content, error)
                with self._lock:
                    self.known.drop(found.key)

    def keep(self, tokens: Sequence[int], caches: Sequence[Any], room: int = sys.maxsize) -> None:
        """Write caches that have seen these ``tokens`` soon, unless they are on disk already, or
        all caches that wait would take more than ``room`` bytes. Nobody may change them from here
        on."""
        key = _key(self.of, tokens)
        with self._lock:
            if found := self.known.whole(key):
                self.known.use(found.key)
                return
        nbytes, waiting = total_bytes(caches), self.pending
        if waiting + nbytes > room:
            why = f"{waiting:,} bytes wait for the disk" if waiting else "requests need the memory"
            _LOG.warning("a prompt cache is not kept on disk: %s", why)
            return
        mx.eval([cache.state for cache in caches])  # in the thread and stream that made them
        with self._lock:
            self.pending += nbytes
        self._writer.submit(self._write, key, list(tokens), list(caches), nbytes)

    def close(self) -> None:
        """Finish the pending writes; entries can still be read."""
        self._writer.shutdown()

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{hashlib.sha256(key).hexdigest()[:32]}.prompt.safetensors"

    def _write(self, key: bytes, tokens: list[int], caches: list[Any], size: int) -> None:
        try:
            self._look()
            free = shutil.disk_usage(self.folder).free
            room = min(self.max_bytes, max(0, self.known.nbytes + free - _SPARE))
            if size > room:
                raise ValueError(f"it has {size:,} bytes, expected at most {room:,}")
            new = Entry(key, size, self._path(key), is_cuttable(caches))
            self._shrink(room - size, new)
            texts = {"cuttable": "yes"} if new.cuttable else {}
            texts |= {"of": self.of, "tokens": json.dumps(tokens)}
            save_prompt_cache(new.content, caches, texts)
            self._add(new.content)
            self._shrink(self.max_bytes)  # a file is larger than its caches
        except Exception as error:  # a full disk, say: the server goes on without
            _LOG.warning("a prompt cache is not kept on disk: %s", error)
        finally:
            with self._lock:
                self.pending -= size

    def _add(self, file: Path) -> None:
        """Register an entry that is on disk; remove it if it is damaged."""
        try:
            texts = saved_texts(file)
            key = _key(texts["of"], json.loads(texts["tokens"]))
            if self._path(key) != file:
                raise ValueError("its name is of other tokens")
            with self._lock:
                new = Entry(key, file.stat().st_size, file, "cuttable" in texts)
                gone = self.known.put(new)
            for one in gone:
                _remove(one.content)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            _refuse(file, error)

    def _look(self) -> None:
        """Bring ``known`` up to date with the directory, which other processes change too."""
        with self._lock:
            gone = {one.content: one.key for one in self.known}
        for file in sorted(self.folder.iterdir(), key=_used):
            if _ENTRY.fullmatch(file.name) and file.is_file() and not gone.pop(file, b""):
                self._add(file)
            elif _BEGUN.fullmatch(file.name) and _used(file) < time.time() - 60:
                _remove(file)
        with self._lock:
            for key in gone.values():
                self.known.drop(key)

    def _shrink(self, nbytes: int, new: Entry[Path] | None = None) -> None:
        """Remove files until they take at most ``nbytes``, with ``new`` as :meth:`Kept.shrink`."""
        with self._lock:
            gone = self.known.shrink(nbytes, new)
        for one in gone:
            _remove(one.content)


def _key(of: str, tokens: Sequence[int]) -> bytes:
    """A key led by a hash of ``of``, so that other models and settings never share a prefix."""
    return hashlib.sha256(of.encode()).digest() + key_of(tokens)


def _refuse(file: Path, error: Exception) -> None:
    """Log an entry that cannot be used, unless another process has just removed it, and remove it
    unless only opening it failed."""
    if os.path.exists(file):  # also in a folder that may not be read any more
        _LOG.warning("a prompt cache on disk is not used: %s: %r", file, error)
        if not isinstance(error, OSError):
            _remove(file)


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def _used(file: Path) -> float:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0
