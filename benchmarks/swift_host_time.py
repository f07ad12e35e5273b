"""Swift's time for one decoding step of one layer beside Python's, on one back end.

    swift build -c release --product mlx-h2o-parity
    python benchmarks/swift_host_time.py --json benchmarks/results/swift_host_time.json

The measurement, and Python's side, are those of host_time.py: the graph of a step is built, but
evaluated only between turns. The languages take turns, one process each.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import host_time
import mlx.core as mx

import mlx_h2o
from lib import common
from mlx_h2o import H2OConfig
from mlx_h2o.evaluation.statistics import in_turns, spread

ROOT = Path(__file__).resolve().parents[1]
COMMAND = ROOT / ".build" / "release" / "mlx-h2o-parity"
ARMS = {
    name: settings
    for name, settings in host_time.ARMS.items()
    if "light_bits" not in settings
    and settings["policy"] != "snapkv"
    and not name.startswith("groups")
}


def fields(name: str, turns: int, steps: int) -> dict[str, Any]:
    """The JSON fields of a case for the Swift command."""
    config = H2OConfig.of(max_kv_size=host_time.ROWS, **ARMS[name])
    names = ("max_kv_size", "sink_size", "heavy_size", "recent_size", "evict_every")
    given = {name: config.named()[name] for name in (*names, "policy", "decay")}
    given |= {} if config.kv_bits is None else {"kv_bits": config.kv_bits}
    scale = host_time.SIZE**-0.5
    return given | {"name": name, "op": "host", "scale": scale, "count": turns, "steps": steps}


def swift(command: Path, backend: str, turns: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step in each turn of every arm."""
    heads = {"queries": host_time.HEADS, "keys": host_time.KV_HEADS, "values": host_time.KV_HEADS}
    rows = {side: mx.random.normal((1, n, 1, host_time.SIZE)) for side, n in heads.items()}
    tensors = {f"{name}/{side}": array for name in ARMS for side, array in rows.items()}
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "given.safetensors"), Path(folder, "made.safetensors")
        cases = json.dumps([fields(name, turns, steps) for name in ARMS])
        mx.save_safetensors(str(given), tensors, {"cases": cases})
        subprocess.run([command, "--backend", backend, given, made], check=True)
        found, metadata = mx.load(str(made), return_metadata=True)
    errors = json.loads(metadata["errors"])
    if errors:
        raise SystemExit(str(errors))
    return {name: found[f"{name}/seconds"].tolist() for name in ARMS}


def python(backend: str, turns: int, steps: int) -> dict[str, list[float]]:
    with mlx_h2o.use_backend(backend):
        arms = {name: host_time.Arm(name, steps) for name in ARMS}
        return {name: [arm.turn(steps) for _ in range(turns)] for name, arm in arms.items()}


def measure(command: Path, backend: str, rounds: int, *counts: int) -> dict[str, Any]:
    sides = {
        "swift": partial(swift, command, backend, *counts),
        "python": partial(python, backend, *counts),
    }
    runs = in_turns(sides, rounds)
    result: dict[str, Any] = {}
    for name in ARMS:
        spreads = {
            side: spread([1e6 * seconds for run in own for seconds in run[name]], 2)
            for side, own in runs.items()
        }
        ratio = round(spreads["swift"]["median"] / spreads["python"]["median"], 2)
        result[name] = {"microseconds": spreads, "swift_of_python": ratio}
        common.show(f"{backend}, {name}", result[name])
    return result


def main() -> None:
    args = common.arguments(
        __doc__, backends=("native", "composed"), rounds=6, turns=5, steps=64, command=str(COMMAND)
    )
    command = Path(args.command)
    if not command.is_file():
        raise SystemExit("run swift build -c release --product mlx-h2o-parity first")
    counts = args.rounds, args.turns, args.steps
    found = {backend: measure(command, backend, *counts) for backend in args.backends}
    given = dict(zip(("rounds", "turns", "steps_per_turn"), counts, strict=True))
    common.save(args.json, {**host_time.SHAPE, **given, "backends": found})


if __name__ == "__main__":
    main()
