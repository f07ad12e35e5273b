"""Files and streams that a command cannot read or write: one line names them."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from mlx_h2o.lm.files import check_writable, write_text

FULL = Path("/dev/full")
on_linux = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which Linux has")


def run(*arguments: object, limit: int | None = None, **given):
    """The command in a process of its own, which may write files of so many bytes."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-m", "mlx_h2o", *map(str, arguments)],
        capture_output="stdout" not in given,
        stderr=subprocess.PIPE if "stdout" in given else None,
        timeout=300,
        preexec_fn=limited,
        **given,
    )


def said(found, status=2) -> str:
    """The last line, of a command that ended in order."""
    text = found.stderr.decode()
    assert found.returncode == status and "Traceback" not in text and "Exception" not in text, text
    return text.splitlines()[-1]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("command", ["generate", "chat", "cache_prompt", "layers", "evaluate"])
def test_a_damaged_model(command, name, folder, tmp_path, refused):
    file = folder / name
    file.write_bytes(file.read_bytes()[:50])
    flags = {
        "generate": ["--prompt", "a"],
        "cache_prompt": ["--prompt", "a", "--prompt-cache-file", str(tmp_path / "a")],
    }
    assert f"{file} is " in refused(command, "--model", folder, *flags.get(command, []))
    assert not (tmp_path / "a.safetensors").exists()


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path):
    file = tmp_path / "a.safetensors"
    flags = ["--model", "demo", "--prompt", "a " * 100, "--prompt-cache-file", file]
    file.write_text("as it was")
    found = said(run("cache_prompt", *flags, limit=100_000))
    assert found.startswith("mlx_h2o cache_prompt: ") and str(file) in found
    assert file.read_text() == "as it was" and files(tmp_path) == {file.name}
    # A disk without room for a page is full before anything is read.
    found = run("cache_prompt", *flags, limit=1000)
    assert f"argument --prompt-cache-file: File too large: '{file}'" in said(found)
    assert b"Processed" not in found.stdout and files(tmp_path) == {file.name}


@pytest.mark.slow
@on_linux
def test_results_that_cannot_be_written():
    flags = ["--model", "demo", "--length", "60", "--documents", "1", "--arms", "full"]
    found = said(run("evaluate", *flags, "--output", FULL))
    assert "No space left on device: '/dev/full'" in found and FULL.is_char_device()
    found = said(run("layers", "--model", "demo", "--output", FULL))
    assert found == "mlx_h2o layers: No space left on device: '/dev/full'"


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("command", [["--help"], ["generate", "-p", "a", "-m", "2"]])
def test_standard_output_that_is_full(command):
    with FULL.open("wb") as full:
        model = ["--model", "demo"] if len(command) > 1 else []
        found = run(*command, *model, stdout=full)
    assert "No space left on device" in said(found, found.returncode) and found.returncode


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_standard_input_that_is_no_text(locale, tmp_path):
    for command, more in (
        ("generate", []),
        ("cache_prompt", ["--prompt-cache-file", tmp_path / "a"]),
    ):
        flags = ["--model", "demo", "--prompt", "-", *more]
        line = said(run(command, *flags, input=b"\xff\xfe", env={**os.environ, "LC_ALL": locale}))
        assert line.startswith(f"mlx_h2o {command}: standard input: 'utf-8' codec can't decode")


def test_a_text_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "a"
    check_writable(file)
    assert files(tmp_path) == set()
    write_text(file, "first")

    full = Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match=rf"No space left on device: '{file}'"):
            write_text(file, "second")
    assert file.read_text() == "first" and files(tmp_path) == {"a"}
    link = tmp_path / "link"
    link.symlink_to(file)
    write_text(link, "third")
    assert file.read_text() == "third" and link.is_symlink()
    with pytest.raises(IsADirectoryError, match=rf"'{tmp_path}'"):
        check_writable(tmp_path)
    write_text(tmp_path / ("é" * 127), "")  # as long as a name can be
    (new := tmp_path / "new").symlink_to(tmp_path / "none" / "a")
    with pytest.raises(FileNotFoundError, match=rf"'{new}'"):
        check_writable(new)  # before the work
