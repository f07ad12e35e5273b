"""Processes of one group on this machine, and a small model on disk for them."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from mlx_lm.utils import save_model

from ranks_program import tiny_qwen2
from tiny_models import tiny_tokenizer

LIBRARY = Path(__file__).parent
PYTHON = Path(__file__).parents[2] / "python"
LONGEST = 1200


@pytest.fixture(scope="module")
def pausing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which waiting processes leave the processor to others."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        return {}
    made = tmp_path_factory.mktemp("yielding") / "yielding.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(made), str(LIBRARY / "yielding.c"), "-ldl"]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": " ".join([str(made), os.environ.get("LD_PRELOAD", "")])}


def started(
    count: int, folder: Path, environment: dict[str, str], *command: str
) -> list[subprocess.Popen[str]]:
    """Start ``count`` processes of one group on this machine; in the command, {rank} becomes the
    rank of each. A single process is in no group."""
    with ExitStack() as stack:
        ports = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in ports:
            one.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in ports]
    (folder / "hosts.json").write_text(json.dumps(hosts))
    path = os.pathsep.join([str(PYTHON), str(LIBRARY), os.environ.get("PYTHONPATH", "")])
    given = os.environ | environment | {
        "PYTHONPATH": path, "MLX_HOSTFILE": str(folder / "hosts.json"),
        "MLX_H2O_CACHE": str(folder / "cache"),
    }  # fmt: skip
    given.pop("MLX_RANK", None)
    return [
        subprocess.Popen(
            [sys.executable, *(part.replace("{rank}", str(rank)) for part in command)],
            env=given | ({"MLX_RANK": str(rank)} if count > 1 else {}),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """The standard output and error of each; no process outlives the test."""
    try:
        return [one.communicate(timeout=LONGEST) for one in processes]
    finally:
        for one in processes:
            one.kill()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model on disk. Words are characters, since transformers splits those of a qwen2."""
    folder, model = tmp_path_factory.mktemp("model"), tiny_qwen2(3)
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(vars(model.args)))
    tiny_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer.json"
    words = re.sub(r'"t(\d+)"', lambda word: json.dumps(chr(48 + int(word[1]))), file.read_text())
    file.write_text(words)
    return str(folder)
