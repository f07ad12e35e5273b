"""What the benchmarks share: models, flags, printed lines, and files of results."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import _get_classes

import mlx_h2o
from mlx_h2o.commands.parsing import new_file
from mlx_h2o.evaluation.environment import environment
from mlx_h2o.evaluation.report import spread_text
from mlx_h2o.lm.files import write_text

_LOAD = round(os.getloadavg()[0], 2)


def random_model(model_type: str = "qwen3", **shape: Any) -> Any:
    """A model of this type and shape with random weights."""
    mx.random.seed(0)
    usual = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 50000.0}
    usual |= {"model_type": model_type, "tie_word_embeddings": True}
    model_class, args = _get_classes(usual)
    return model_class(args.from_dict(usual | shape))


MODELS: dict[str, Callable[[], Any]] = {
    "demo": lambda: mlx_h2o.load("demo")[0],  # 5.5 million parameters
    "random-100m": partial(
        random_model, hidden_size=768, num_hidden_layers=14, intermediate_size=2048,
        num_attention_heads=12, num_key_value_heads=4, head_dim=64, vocab_size=8192,
    ),
}  # fmt: skip


def loaded(name: str) -> Any:
    """A model of MODELS, or in a directory, in float32."""
    model = MODELS[name]() if name in MODELS else mlx_h2o.load(name)[0]
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def arguments(said: str, *bare: str, **flags: Any) -> argparse.Namespace:
    """The command line's values of these flags, and of `--json FILE`.

    Args:
        said: the script's docstring.
        bare: the flags that are positional.
        flags: defaults: numbers, texts, or several of one kind. At least 5 `repeats`.
    """
    parser = argparse.ArgumentParser(description=said.partition("\n")[0])
    for name, default in flags.items():
        several = isinstance(default, tuple)
        parser.add_argument(
            name if name in bare else f"--{name.replace('_', '-')}",
            type=type(default[0] if several else default), default=default,
            nargs="+" if several else "?" if name in bare else None, help="(default %(default)s)",
        )  # fmt: skip
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the result here")
    found = parser.parse_args()
    if getattr(found, "repeats", 5) < 5:
        parser.error("expected at least 5 repeats")
    return found


def memory(name: str, file: str = "self/status") -> int:
    """Bytes that Linux reports for a process: VmHWM or VmRSS, or Pss of its smaps_rollup."""
    lines = (Path("/proc") / file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def in_a_process(call: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """What a function returns in a new process, which imports its script again."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *given).result()


def show(name: str, figures: Mapping[str, Any]) -> None:
    """A line of figures, spreads as minimum, median and maximum."""
    spreads = {
        key: spread_text(one) if isinstance(one, dict) and "median" in one else one
        for key, one in figures.items()
    }
    print(f"{name:32}", ", ".join(f"{key} {one}" for key, one in spreads.items()), flush=True)


def described(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result with the machine, the versions, and the load at the start and now."""
    load = [_LOAD, round(os.getloadavg()[0], 2)]
    return {"environment": environment(), "load_average_before_and_after": load, **result}


def write(file: Path | None, content: Mapping[str, Any]) -> None:
    """Write JSON, if there is a file."""
    if file is not None:
        write_text(file, json.dumps(content, indent=1) + "\n")


def save(file: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result with its description."""
    write(file, described(result))
