"""Prompt caches on disk, found by the tokens that they hold: what a server knows when it restarts.

An entry is two files: the caches as ``save_prompt_cache`` writes them, and then a JSON file with
the tokens, without which the first does not count. Both appear whole or not at all.
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
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..lm.files import write_text
from ..lm.prompt_cache import with_own_rows
from ..lm.saving import load_prompt_cache, save_prompt_cache
from .radix import RadixTree

__all__ = ["PromptStore"]

_LOG = logging.getLogger("mlx_h2o")
_CACHES, _ENTRY = ".safetensors", ".json"
_OURS = re.compile(r"\.?[0-9a-f]{32}\..+")
_WAITING = 8
"""Prompts that may wait to be written; while there are as many, further ones are not kept."""


@dataclass(frozen=True)
class _Kept:
    """An entry: its files without their suffix, what it is of, and the bytes of both files."""

    path: Path
    of: str
    tokens: list[int]
    nbytes: int


class PromptStore:
    """A directory of prompt caches, of at most so many bytes.

    The entry used longest ago goes first. Writing happens in a thread of its own; what cannot be
    written is said in the log and is not kept. Several processes may share a directory.

    Args:
        folder: where; it is made if it is missing, for this user alone.
        max_bytes: of all files together.

    Raises:
        OSError: the directory cannot be made or written to.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        self.folder, self.max_bytes = Path(folder), max_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = self.folder / f".{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
        self._lock = threading.Lock()
        self._kept: dict[Path, _Kept] = {}  # used longest ago first
        self._trees: dict[str, RadixTree[_Kept]] = defaultdict(RadixTree)  # by what they are of
        own = (file for file in self.folder.glob(f"*{_ENTRY}") if _OURS.fullmatch(file.name))
        for file in sorted(own, key=_used):  # others' files are left alone
            if (kept := _read(file)) is not None:
                self._add(kept)
        self._clean()
        self._make_room(0)
        self._queue: queue.Queue[tuple[str, list[int], list[Any]] | None] = queue.Queue(_WAITING)
        self._writer = threading.Thread(target=self._write_all, name="prompt store", daemon=True)
        self._writer.start()

    def _clean(self) -> None:
        """Remove what processes have left that ended while they were writing."""
        for file in self.folder.iterdir():
            ours = _OURS.fullmatch(file.name)
            if ours and file.with_suffix("") not in self._kept and _used(file) < time.time() - 60:
                with contextlib.suppress(OSError):
                    file.unlink()

    @property
    def nbytes(self) -> int:
        """Of all entries that this process knows of."""
        with self._lock:
            return sum(kept.nbytes for kept in self._kept.values())

    def find(self, of: str, tokens: Sequence[int], more_than: int = 0) -> tuple[list[Any], int]:
        """The caches of the longest prefix of ``tokens`` that is kept, and its length.

        Args:
            of: what :meth:`keep` was told.
            tokens: of a prompt; one at least stays to be read.
            more_than: shorter prefixes are not wanted.

        Returns:
            Caches and their tokens; ([], 0) where there are none. An entry that is damaged goes.
        """
        while True:
            with self._lock:
                near = self._trees[of].nearest(tokens[:-1])
                whole = (one for shared, one in near if shared == len(one.tokens))
                kept = next(whole, None)
                if kept is None or len(kept.tokens) <= more_than:
                    return [], 0
                self._kept[kept.path] = self._kept.pop(kept.path)  # the last to go now
            try:
                caches = load_prompt_cache(kept.path.with_suffix(_CACHES))
                mx.eval([cache.state for cache in caches])  # while the file is there
                kept.path.with_suffix(_ENTRY).touch()
            except (OSError, ValueError) as error:
                _LOG.warning("a prompt cache on disk is not used: %s", error)
                self._forget(kept)
                continue
            return caches, len(kept.tokens)

    def keep(self, of: str, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        """Write the caches of ``tokens`` soon, unless the same are there.

        Args:
            of: names the model and the settings; only the same name finds them.
            tokens: all that the caches have seen.
            caches: one per layer, which nobody changes from here on.
        """
        if any(not isinstance(token, int) for token in tokens):
            return  # such as parts of images
        with self._lock:
            if (path := self._path(of, tokens)) in self._kept:
                self._kept[path] = self._kept.pop(path)
                return
        caches = with_own_rows(caches)
        mx.eval([cache.state for cache in caches])  # in the thread and stream that made them
        try:
            self._queue.put_nowait((of, list(tokens), list(caches)))
        except queue.Full:
            _LOG.warning("prompt caches come faster than they are written: one is not kept")

    def close(self, timeout: float = 30) -> None:
        """Write what waits, for this many seconds at most; entries may be read on."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
            self._writer.join(timeout)

    def _path(self, of: str, tokens: Sequence[int]) -> Path:
        return self.folder / hashlib.sha256(repr((of, list(tokens))).encode()).hexdigest()[:32]

    def _write_all(self) -> None:
        while (waiting := self._queue.get()) is not None:
            try:
                self._write(*waiting)
            except Exception as error:  # a full disk, say: the server goes on without
                _LOG.warning("a prompt cache is not kept on disk: %s", error)

    def _write(self, of: str, tokens: list[int], caches: list[Any]) -> None:
        path = self._path(of, tokens)
        arrays: Any = tree_flatten([cache.state for cache in caches])
        size = sum(getattr(array, "nbytes", 0) for _, array in arrays)
        if size > self.max_bytes:
            raise ValueError(f"it has {size:,} bytes, expected at most {self.max_bytes:,}")
        self._make_room(size)
        file = path.with_suffix(_CACHES)
        try:
            save_prompt_cache(file, caches)
            size = file.stat().st_size
            text = json.dumps({"of": of, "tokens": tokens, "bytes": size})
            write_text(path.with_suffix(_ENTRY), text)
        except BaseException:
            _remove(path)
            raise
        with self._lock:
            self._add(_Kept(path, of, tokens, size + len(text)))
        self._make_room(0)

    def _add(self, kept: _Kept) -> None:
        self._kept[kept.path] = kept
        self._trees[kept.of].put(kept.tokens, kept)

    def _make_room(self, size: int) -> None:
        """Entries go until there is room for this many bytes more."""
        while self.nbytes > self.max_bytes - size:
            with self._lock:
                oldest = next(iter(self._kept.values()))
            self._forget(oldest)

    def _forget(self, kept: _Kept) -> None:
        with self._lock:
            if self._kept.pop(kept.path, None):
                self._trees[kept.of].remove(kept.tokens)
        _remove(kept.path)


def _read(file: Path) -> _Kept | None:
    """The entry that a JSON file describes; one that is damaged goes."""
    path = file.with_suffix("")
    try:
        text = file.read_text("utf-8")
        found = json.loads(text)
        tokens, of = found["tokens"], found["of"]
        whole = isinstance(tokens, list) and all(type(token) is int for token in tokens)
        size = path.with_suffix(_CACHES).stat().st_size
        if not whole or not isinstance(of, str) or size != found["bytes"]:
            raise ValueError(f"{file} is damaged")
    except (OSError, ValueError, TypeError, KeyError) as error:
        _LOG.warning("a prompt cache on disk is not used: %s", error)
        _remove(path)
        return None
    return _Kept(path, of, tokens, size + len(text))


def _remove(path: Path) -> None:
    for suffix in (_ENTRY, _CACHES):
        with contextlib.suppress(OSError):
            path.with_suffix(suffix).unlink()


def _used(file: Path) -> float:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0
