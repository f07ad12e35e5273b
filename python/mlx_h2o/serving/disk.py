"""Prompt caches on disk, found by the tokens that they hold: what a server knows when it restarts.

An entry is a file of ``save_prompt_cache``, which appears whole or not at all. What it is of and
the tokens are texts in its header.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..lm.files import check_folder
from ..lm.prompt_cache import with_own_rows
from ..lm.saving import load_prompt_cache, save_prompt_cache, saved_texts
from .radix import RadixTree

__all__ = ["PromptStore"]

_LOG = logging.getLogger("mlx_h2o")
_ENTRY = re.compile(r"[0-9a-f]{32}\.safetensors")
_BEGUN = re.compile(rf"\.{_ENTRY.pattern}\..+")
"""A file that is being written, or was when its process ended."""
_WAITING = 8
"""Prompts that may wait to be written; while there are as many, further ones are not kept."""


@dataclass(frozen=True)
class _Kept:
    """An entry: its file, whether it is of this model and settings, and the bytes of the file."""

    file: Path
    own: bool
    tokens: list[int]
    nbytes: int


class PromptStore:
    """A directory of prompt caches, of at most so many bytes.

    The entry used longest ago goes first. Writing happens in a thread of its own; what cannot be
    written is said in the log and is not kept. Several processes may share a directory.

    Args:
        folder: where; it is made if it is missing, for this user alone.
        max_bytes: of all files together, of other models and settings too.
        of: names the model and the settings; what is kept under another name is not found.

    Raises:
        OSError: the directory cannot be made or written to.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, of: str) -> None:
        self.folder, self.max_bytes, self.of = Path(folder), max_bytes, of
        check_folder(os.fspath(folder))
        self._lock = threading.Lock()
        self._kept: dict[Path, _Kept] = {}  # used longest ago first
        self._tree = RadixTree[_Kept]()  # of those that may be found
        for file in sorted(self.folder.iterdir(), key=_used):  # others' files are left alone
            if _ENTRY.fullmatch(file.name):
                self._add(file)
            elif _BEGUN.fullmatch(file.name) and _used(file) < time.time() - 60:
                _remove(file)
        self._make_room(0)
        self._queue: queue.Queue[tuple[list[int], list[Any]] | None] = queue.Queue(_WAITING)
        self._writer = threading.Thread(target=self._write_all, name="prompt store", daemon=True)
        self._writer.start()

    @property
    def nbytes(self) -> int:
        """Of all entries that this process knows of."""
        with self._lock:
            return sum(kept.nbytes for kept in self._kept.values())

    def find(self, tokens: Sequence[int], more_than: int = 0) -> tuple[list[Any], int]:
        """The caches of the longest prefix of ``tokens`` that is kept, and its length.

        Args:
            tokens: of a prompt; one at least stays to be read.
            more_than: shorter prefixes are not wanted.

        Returns:
            Caches and their tokens; ([], 0) where there are none. An entry that is damaged goes.
        """
        while True:
            with self._lock:
                near = self._tree.nearest(tokens[:-1])
                whole = (one for shared, one in near if shared == len(one.tokens))
                kept = next(whole, None)
                if kept is None or len(kept.tokens) <= more_than:
                    return [], 0
                self._kept[kept.file] = self._kept.pop(kept.file)  # the last to go now
            try:
                caches = load_prompt_cache(kept.file)
                mx.eval([cache.state for cache in caches])  # while the file is there
                kept.file.touch()
            except (OSError, ValueError) as error:
                _LOG.warning("a prompt cache on disk is not used: %s", error)
                self._forget(kept)
                continue
            return caches, len(kept.tokens)

    def keep(self, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        """Write the caches of ``tokens`` soon, unless the same are there.

        Args:
            tokens: all that the caches have seen.
            caches: one per layer, which nobody changes from here on.
        """
        with self._lock:
            if (file := self._file(tokens)) in self._kept:
                self._kept[file] = self._kept.pop(file)
                return
        caches = with_own_rows(caches)
        mx.eval([cache.state for cache in caches])  # in the thread and stream that made them
        try:
            self._queue.put_nowait((list(tokens), list(caches)))
        except queue.Full:
            _LOG.warning("prompt caches come faster than they are written: one is not kept")

    def close(self, timeout: float = 30) -> None:
        """Write what waits, for this many seconds at most; entries may be read on."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
            self._writer.join(timeout)

    def _file(self, tokens: Sequence[int]) -> Path:
        name = hashlib.sha256(repr((self.of, list(tokens))).encode()).hexdigest()[:32]
        return self.folder / f"{name}.safetensors"

    def _write_all(self) -> None:
        while (waiting := self._queue.get()) is not None:
            try:
                self._write(*waiting)
            except Exception as error:  # a full disk, say: the server goes on without
                _LOG.warning("a prompt cache is not kept on disk: %s", error)

    def _write(self, tokens: list[int], caches: list[Any]) -> None:
        arrays: Any = tree_flatten([cache.state for cache in caches])
        size = sum(getattr(array, "nbytes", 0) for _, array in arrays)
        if size > self.max_bytes:
            raise ValueError(f"it has {size:,} bytes, expected at most {self.max_bytes:,}")
        self._make_room(size)
        file = self._file(tokens)
        save_prompt_cache(file, caches, {"of": self.of, "tokens": json.dumps(tokens)})
        self._add(file)
        self._make_room(0)

    def _add(self, file: Path) -> None:
        """An entry that is there; one that is damaged goes."""
        try:
            texts = saved_texts(file)
            own, tokens = texts["of"] == self.of, json.loads(texts["tokens"])
            if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
                raise ValueError("it has no tokens")
            kept = _Kept(file, own, tokens, file.stat().st_size)
        except (OSError, ValueError, KeyError) as error:
            _LOG.warning("a prompt cache on disk is not used: %s: %r", file, error)
            _remove(file)
            return
        with self._lock:
            self._kept[file] = kept
            if kept.own:
                self._tree.put(tokens, kept)

    def _make_room(self, size: int) -> None:
        """Entries go until there is room for this many bytes more."""
        while self.nbytes > self.max_bytes - size:
            with self._lock:
                oldest = next(iter(self._kept.values()))
            self._forget(oldest)

    def _forget(self, kept: _Kept) -> None:
        with self._lock:
            if self._kept.pop(kept.file, None) and kept.own:
                self._tree.remove(kept.tokens)
        _remove(kept.file)


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def _used(file: Path) -> float:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0
