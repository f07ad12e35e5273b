"""Prompt caches on disk: which one is found, which are removed, and what accidents leave."""

import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import H2OConfig, H2OKVCache
from mlx_h2o.lm.outline import total_bytes
from mlx_h2o.lm.saving import saved_texts
from mlx_h2o.serving.disk import PromptStore, _key
from paths import IMPORTS

PLENTY, DEEP = 1 << 30, "[" * 100_000
SAVING = """
from serving.test_prompt_store import caches_of, PLENTY
from mlx_h2o.serving.disk import PromptStore
{before}
store = PromptStore({folder!r}, PLENTY, "model")
for length in range({first}, {last}):
    store.keep(range(length), caches_of(length))
    print(length, flush=True)
store.close()
"""

pytestmark = pytest.mark.usefixtures("mlx_lm_stays_as_it_is")


def caches_of(length: int, layers: int = 2) -> list[H2OKVCache]:
    """Caches that have seen ``range(length)``, with the same rows whenever they are made."""
    made = []
    for layer in range(layers):
        drawn = np.random.default_rng(layer).standard_normal((length, 2, 16), dtype=np.float32)
        rows = mx.array(drawn.swapaxes(0, 1)[None])
        cache = H2OKVCache(H2OConfig.of(max_kv_size=20, policy="window"))
        cache.update_and_fetch(rows, 2 * rows)
        made.append(cache)
    return made


def kept(folder: Path, *lengths: int, of: str = "model", size: int = PLENTY) -> PromptStore:
    """A store that was told to keep prompts of these lengths, one after the other."""
    store = PromptStore(folder, size, of)
    for length in lengths:
        store.keep(range(length), caches_of(length))
    store.close()
    return store


def check_found(store: PromptStore, asked: int, length: int) -> None:
    caches, found = store.find(range(asked))
    assert found == length
    if length:
        for one, other in zip(caches, caches_of(length), strict=True):
            other.flush()
            assert (one.offset, one.size()) == (length, min(length, 20))
            for ours, theirs in zip(one.keys_and_values(), other.keys_and_values(), strict=True):
                np.testing.assert_array_equal(np.array(ours), np.array(theirs))


def lengths_in(folder: Path) -> list[int]:
    """Tokens of each entry, by its header."""
    return [len(json.loads(saved_texts(one)["tokens"])) for one in folder.glob("[!.]*.safetensors")]


def child(folder: Path, first: int, last: int, before: str = "") -> subprocess.Popen[str]:
    program = SAVING.format(folder=str(folder), first=first, last=last, before=before)
    given: Any = {"env": os.environ | {"PYTHONPATH": IMPORTS}, "text": True}
    given |= dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", program], **given)


def test_the_longest_prefix_is_found_also_after_a_restart(tmp_path):
    tmp_path /= "made/here"
    for store in (kept(tmp_path, 16, 18, 30, 25), kept(tmp_path, 10)):
        assert sorted(lengths_in(tmp_path)) == [18, 25, 30]  # 18 serves 16 and 10
        check_found(store, 40, 30)
        check_found(store, 30, 25)  # one token at least is to be read
        check_found(store, 10, 9)  # of the 18, of which none was evicted
        assert store.find([*range(9), 99], 8)[1] == 9
        assert store.find([0, 99]) == ([], 0)  # one is not worth reading 18
        assert store.find([1, *range(1, 40)]) == ([], 0)
        assert store.find(range(40), more_than=30) == ([], 0)
        assert store.known.nbytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    another = PromptStore(tmp_path, PLENTY, "another model")
    assert another.find(range(40)) == ([], 0) and another.known.nbytes == store.known.nbytes
    for order in ((3, 19), (19, 3)):  # reading 19 for 3 would take longer
        store = kept(tmp_path / f"{order}", *order)
        assert sorted(lengths_in(store.folder)) == [3, 19]
        assert store.find([0, 1, 2, 99], 2)[1] == 3  # of the one that is read whole
    assert tmp_path.stat().st_mode & 0o777 == 0o700  # for its user alone


def test_what_was_used_longest_ago_goes(tmp_path):
    one = kept(tmp_path / "one", 30).known.nbytes
    store = PromptStore(tmp_path / "all", int(2.5 * one), "model")
    for length in (30, 31, 32):
        store.keep(range(length), caches_of(length))
        while not store.known.use(_key("model", range(length))):
            time.sleep(0.01)
        check_found(store, 31, 30)  # is used again and again
    store.close()
    again = PromptStore(tmp_path / "all", int(2.5 * one), "model")
    assert [again.find(range(n))[1] for n in (31, 32, 33)] == [30, 30, 32]
    assert PromptStore(tmp_path / "all", one + 1, "model").known.nbytes <= one + 1


def test_a_beginning_goes_before_another_that_is_as_old(tmp_path):
    """Room for an entry is made by those that it replaces."""
    other = kept(tmp_path, 20, of="another model")
    size = int(1.3 * kept(tmp_path, 19).known.nbytes)
    assert kept(tmp_path, 20, size=size).find(range(21))[1] == other.find(range(21))[1] == 20


def test_what_is_had_from_memory_is_used_too(tmp_path):
    assert kept(tmp_path, 30, 31).find(range(31), 30) == ([], 0)
    known = PromptStore(tmp_path, PLENTY, "model").known
    assert [one.key for one in known] == [_key("model", range(length)) for length in (31, 30)]


def test_a_folder_is_read_once_for_an_entry(tmp_path, monkeypatch):
    kept(tmp_path, 30)
    read, iterdir = [], Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: read.append(path) or iterdir(path))
    kept(tmp_path, 31, 32)
    assert read == [tmp_path] * 3  # one of them as it begins


def test_two_share_a_folder_and_its_limit(tmp_path):
    size = int(3.9 * kept(tmp_path / "one", 30).known.nbytes)
    both = [PromptStore(tmp_path / "all", size, "model") for _ in range(2)]
    for length in range(30, 40):
        store = both[length % 2]
        store.keep(range(length), caches_of(length))
        while not store.find(range(length + 1), length - 1)[1]:
            time.sleep(0.01)
    for store in both:
        store.close()
    assert sum(file.stat().st_size for file in (tmp_path / "all").iterdir()) <= size
    assert sorted(lengths_in(tmp_path / "all")) == [37, 38, 39]


def test_what_is_too_large_is_not_kept(tmp_path, caplog):
    kept(tmp_path, 30, size=1000)
    assert not list(tmp_path.iterdir())
    (told,) = caplog.messages
    assert told.startswith("a prompt cache is not kept on disk: ") and "at most 1,000" in told


def test_what_waits_for_a_slow_disk_has_little_room(tmp_path, monkeypatch, caplog):
    disk, write = threading.Event(), PromptStore._write
    monkeypatch.setattr(PromptStore, "_write", lambda *given: disk.wait(60) and write(*given))
    store, one = PromptStore(tmp_path, PLENTY, "model"), total_bytes(caches_of(30))
    for length, room in ((29, one - 1), (30, one), (31, 2 * one), (32, 3 * one - 1)):
        store.keep(range(length), caches_of(length), room)
    disk.set()
    store.close()
    assert sorted(lengths_in(tmp_path)) == [30, 31] and store.pending == 0
    said = "a prompt cache is not kept on disk: "
    assert caplog.messages == [
        f"{said}requests need the memory", f"{said}{2 * one:,} bytes wait for the disk"
    ]  # fmt: skip


def test_a_full_disk_takes_what_was_used_longest_ago(tmp_path, monkeypatch, caplog):
    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=disk - sum(one.stat().st_size for one in folder.iterdir()))

    disk = (1 << 24) + int(2.5 * kept(tmp_path, 30).known.nbytes)
    monkeypatch.setattr("shutil.disk_usage", usage)
    kept(tmp_path, 31, 32)
    assert sorted(lengths_in(tmp_path)) == [31, 32] and not caplog.records
    disk = 1 << 20  # of which others have taken the rest
    kept(tmp_path, 33)
    assert sorted(lengths_in(tmp_path)) == [31, 32] and "expected at most 0" in caplog.text


def flipped(file: Path) -> None:
    found = bytearray(file.read_bytes())
    found[-3] ^= 1
    file.write_bytes(found)


def changed(name: str, text: str | None) -> Any:
    """Another text in the header, or none."""

    def change(file: Path) -> None:
        arrays, texts = mx.load(str(file), return_metadata=True)
        mx.eval(arrays)
        texts |= {f"0.{name}": text}
        mx.save_safetensors(str(file), arrays, {key: one for key, one in texts.items() if one})

    return change


@pytest.mark.parametrize(
    "damage",
    [
        flipped, changed("of", None), changed("mlx_h2o", DEEP), lambda file: file.write_text("{"),
        lambda file: file.write_bytes(file.read_bytes()[:-8]),
        *(changed("tokens", one) for one in ("abc", "{}", "[1, 2.5]", f"{[*range(29), 99]}", DEEP)),
    ],
)  # fmt: skip
def test_damaged_entries_are_not_used_and_go(tmp_path, damage, caplog):
    kept(tmp_path, 30)
    (file,) = tmp_path.glob("*.safetensors")
    damage(file)
    store = PromptStore(tmp_path, PLENTY, "model")
    check_found(store, 40, 0)
    assert store.find([*range(29), 99, 30]) == ([], 0)
    assert "a prompt cache on disk is not used" in caplog.text
    assert not list(tmp_path.iterdir()) and store.known.nbytes == 0


def test_files_of_others_are_left_alone(tmp_path):
    """A folder of a model, say, whose files are as old as those of a process that was killed."""
    others = {"config.json": "{}", "model.json": "[1,", "model.safetensors": "foreign", "a.txt": ""}
    others[f"{'0' * 32}.safetensors"] = "a hash of others"
    for name, text in others.items():
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (0, 0))
    kept(tmp_path, 30)
    (begun := tmp_path / f".{'0' * 32}.prompt.safetensors.1").touch()  # another process writes it
    for is_there, seconds in ((True, 30), (False, 90)):
        os.utime(begun, (0, time.time() - seconds))
        check_found(PromptStore(tmp_path, PLENTY, "model"), 31, 30)
        assert begun.exists() == is_there
    assert {name: (tmp_path / name).read_text() for name in others} == others


def test_an_entry_that_is_not_opened_stays(tmp_path, monkeypatch):
    """As where a process has too many open files; if it cannot be marked as used, it serves."""
    store = kept(tmp_path, 30)
    with monkeypatch.context() as read_only:
        read_only.setattr("os.utime", lambda *_: os.stat("/none"))
        check_found(store, 40, 30)
    with monkeypatch.context() as full:
        full.setattr("mlx_h2o.lm.saving.texts_of", lambda *_: os.stat("/none"))
        check_found(store, 40, 0)
        check_found(PromptStore(tmp_path, PLENTY, "model"), 40, 0)
    check_found(PromptStore(tmp_path, PLENTY, "model"), 40, 30)


def test_damage_while_it_runs_leaves_the_next_best(tmp_path, caplog):
    store = kept(tmp_path, 10, 30)
    max(tmp_path.glob("*.safetensors"), key=lambda file: file.stat().st_size).write_bytes(b"")
    check_found(store, 40, 10)
    for file in tmp_path.iterdir():
        file.unlink()  # as another server does whose limit is lower
    caplog.clear()
    check_found(store, 40, 0)
    assert not caplog.records


@pytest.mark.slow
def test_a_full_disk_is_said_and_served_without(tmp_path):
    """Writing fails beyond some bytes, as the system makes it fail."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000))"
    process = child(tmp_path, 10, 40, f"{limited}\nimport logging; logging.basicConfig()")
    out, said = process.communicate(timeout=60)
    assert process.returncode == 0 and out.split()[-1] == "39"
    assert "a prompt cache is not kept on disk" in said
    lengths = lengths_in(tmp_path)
    assert lengths and max(lengths) < 39
    assert len(list(tmp_path.iterdir())) == len(lengths)
    check_found(PromptStore(tmp_path, PLENTY, "model"), 40, max(lengths))


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_moment_corrupts_nothing(tmp_path, seed, caplog):
    process = child(tmp_path, 10, 10_000)
    assert process.stdout is not None
    for _ in range(random.Random(seed).randrange(1, 30)):
        process.stdout.readline()
    time.sleep(random.Random(seed).random() / 100)
    process.kill()
    process.communicate()
    with caplog.at_level(logging.WARNING):
        store = PromptStore(tmp_path, PLENTY, "model")
        lengths = lengths_in(tmp_path)
        for length in lengths:
            check_found(store, length + 1, length)
    assert not caplog.records
    for file in tmp_path.iterdir():  # later: what was left half done goes
        os.utime(file, (0, 0))
    PromptStore(tmp_path, PLENTY, "model")
    assert len(list(tmp_path.iterdir())) == len(lengths)
