"""The committed profile and what Python shares out by it, for the tests of C and Swift.

``PYTHONPATH=tests python tests/profile_data.py`` writes the files anew; ``test_c_api_profile`` says
whether they are in step.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_h2o import H2OConfig, Profile
from mlx_h2o.lm.profile import fingerprint

FOLDER = Path(__file__).parent / "data" / "profiles"
SETTINGS: tuple[tuple[int, dict[str, Any]], ...] = (
    (35, {}),  # below what was measured
    (120, {}),
    (301, {"sink_size": 2}),
    (600, {"evict_every": 3, "decay": 0.5}),
    (900, {"max_kv_size": 64, "evict_every": 2}),  # one row of 32: follows the budget
    (1300, {"sink_size": 0}),
    (2500, {"sink_size": 12}),  # beyond a document
)


def weights() -> dict[str, mx.array]:
    """Made-up parameters of every kind, wide and small."""
    rng = np.random.default_rng(5)
    wide = mx.array(rng.standard_normal((7, 33)).astype(np.float32))
    return {
        "layers.0.weight": wide,
        "layers.1.weight": wide[:3].astype(mx.bfloat16),
        "layers.10.weight": wide.T[:, 2:].astype(mx.float16),
        "embed.weight": mx.array(rng.integers(0, 2**32, (5, 8), dtype=np.uint32)),
        "embed.scales": wide[0, :1],
        "norm": mx.array(0.5),
    }


def profile() -> Profile:
    rng = np.random.default_rng(2)
    shape = (5, 4, 3)
    far = rng.uniform(0.001, 0.8, (shape[0], 1, 1))
    loss = far * np.sort(rng.uniform(0, 1, shape), axis=1)[:, ::-1]
    loss[0] = loss[1]  # two layers alike, which share what does not divide
    loss[2, :, 2] = -0.001  # all recent is best
    about = {"model": "tiny", "fingerprint": _of(weights()), "policy": "merge", "documents": 2}
    about |= {"tokens": 320, "sink_size": 4, "recent_size": 5, "versions": {"mlx": "0"}}
    rows, shares = (10, 30, 80, 160), (0.125, 0.5, 1.0)
    return Profile(loss.astype(np.float32), rows, shares, about)


def _of(parameters: dict[str, mx.array]) -> str:
    return fingerprint(SimpleNamespace(parameters=lambda: parameters))


def shares() -> list[dict[str, Any]]:
    """What Python says: rows in all, settings, and those of each layer."""
    found = []
    for total, given in SETTINGS:
        layers = [
            {name: getattr(one, name) for name in ("max_kv_size", "sink_size", "heavy_size",
                                                   "recent_size", "policy", "evict_every")}
            for one in profile().share(total, H2OConfig(**given))
        ]  # fmt: skip
        found.append({"total_rows": total, "settings": given, "layers": layers})
    return found


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    profile().save(FOLDER / "profile.safetensors")
    unfinished = profile()
    unfinished.loss[3, 2, 1] = np.nan
    unfinished.save(FOLDER / "unfinished.safetensors")
    mx.save_safetensors(str(FOLDER / "weights.safetensors"), weights())
    lines = ",\n".join(json.dumps(one) for one in shares())
    (FOLDER / "shares.json").write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    write()
