"""What is known of models: which are not served, and in which form others get their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .routing import calls_attention, modules_of


@dataclass(frozen=True)
class Facts:
    """Of a file of mlx_lm.models.

    handed: the form in which its attention gets quantised rows, one of ``config.HANDED``.
    refused: why it cannot be served; else empty.
    of: whether this holds for a module.
    """

    handed: str = "packed"
    refused: str = ""
    of: Callable[[Any], bool] = lambda module: True


MODELS = {
    "afm7": Facts(refused="its shared layers take the position from the number of stored rows"),
    "deepseek_v32": Facts(refused="its indexer selects rows by their slot"),
    "gemma2": Facts("grouped", of=lambda module: getattr(module, "repeats", 1) > 1),
    "minimax_m3_vl": Facts(refused="its attention selects blocks of rows by their slot"),
    "mla": Facts("latents"),
    "phi": Facts("arrays"),
    "phi3small": Facts(refused="its block-sparse attention selects rows by their slot"),
    "phixtral": Facts("arrays"),
    "plamo": Facts("arrays"),
    "stablelm": Facts("arrays"),
}
"""All others call mlx_lm's attention with the keys of the cache, or get "fused" arrays."""


def refusal(model: Any) -> str:
    """Why a model cannot be served; else empty."""
    return next((one.refused for one in _facts(model) if one.refused), "")


def computes_with_keys(model: Any) -> bool:
    """Whether it is known to do so between the cache and attention, which then gets others."""
    return bool({one.handed for one in _facts(model)} & {"arrays", "latents"})


def handed(model: Any, packs: bool) -> str:
    """The form in which a model gets its rows, and masks; ``packs``: these are quantised."""
    known = {one.handed for one in _facts(model)}
    if not calls_attention(model):
        return "grouped" if "grouped" in known else "fused"
    return next((form for form in ("latents", "arrays") if packs and form in known), "packed")


def _facts(model: Any) -> list[Facts]:
    found = {}
    for module in modules_of(model):
        for cls in type(module).__mro__:
            package, _, file = cls.__module__.rpartition(".")
            if package == "mlx_lm.models" and file in MODELS and MODELS[file].of(module):
                found[file] = MODELS[file]
    return [found[file] for file in sorted(found)]
