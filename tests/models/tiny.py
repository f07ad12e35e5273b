"""Tiny random models of every architecture that the installed mlx_lm has."""

import contextlib
import dataclasses
import importlib
import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models

_SETTINGS = json.loads(Path(__file__).with_name("settings.json").read_text())
COMMON: dict[str, Any] = _SETTINGS["common"]
"""Small sizes by the names that model files use."""
SPECIAL: dict[str, dict[str, Any]] = _SETTINGS["special"]
"""What differs, by model file; a model inside of another has a name and settings of its own."""
SPECIAL |= {
    name: {"text_config": COMMON | {"model_type": inner} | SPECIAL.get(inner, {}) | more}
    for name, (inner, more) in _SETTINGS["inside"].items()
}
_PACKED = {"prism_hadamard_qwen35": "its weights exist only packed; its layers are qwen3_5's"}


class NotBuiltError(Exception):
    """A model file that gives no model here, and why."""


def architectures() -> list[str]:
    """Names of the model files, helpers left out by what they define."""
    folder = Path(mlx_lm.models.__path__[0])
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    return [name for name in names if _defines_model(folder / f"{name}.py")]


def build(name: str, seed: int = 0, **special: Any) -> Any:
    """A float32 model of this file with two to four small layers and random weights.

    ``special`` settings win over those of the table.

    Raises NotBuiltError where the file cannot be imported, or has no weights that could be random.
    """
    if name in _PACKED:
        raise NotBuiltError(_PACKED[name])
    module = _import(name)
    names = {field.name for field in dataclasses.fields(module.ModelArgs)}
    settings = {own: value for own, value in COMMON.items() if own in names}
    settings |= SPECIAL.get(name, {}) | special
    settings["model_type"] = SPECIAL.get(name, {}).get("model_type", name)
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(settings))
    model.set_dtype(mx.float32)
    model.eval()
    mx.eval(model.parameters())
    return model


def _defines_model(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return "class ModelArgs" in text or "import Model" in text


def _import(name: str) -> Any:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            return importlib.import_module(f"mlx_lm.models.{name}")
    except SystemExit as error:  # a file that wants a package of its own leaves the process
        raise NotBuiltError(said.getvalue().strip().splitlines()[0]) from error
