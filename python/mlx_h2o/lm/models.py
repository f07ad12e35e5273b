"""Facts about models: which cannot be served, in which form the others get their rows, and how to
tell them apart."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache

from .routing import args_of, calls_attention

_REFUSED = {
    "afm7": "its shared layers take the position from the number of stored rows",
    "deepseek_v32": "its indexer selects rows by their slot",
    "minimax_m3_vl": "its attention selects blocks of rows by their slot",
    "phi3small": "its block-sparse attention selects rows by their slot",
}
"""Why models of these files of mlx_lm.models cannot be served."""

_FORMS = {"gemma2": "grouped", "mla": "latents"}
_FORMS |= dict.fromkeys(("phi", "phixtral", "plamo", "stablelm"), "arrays")
"""The form, one of ``config.HANDED``, in which models of these files get quantised rows. All others
call mlx_lm's attention with the keys of the cache, or get "fused" arrays."""

_PADDED = "bailing_moe_linear gpt_bigcode jamba longcat_flash_ngram nemotron_h olmo_hybrid"
"""Files whose models read the padding of a batch as tokens, or cannot read batches at all."""

WEIGHTS = "fingerprint of weights"
"""The name of the fact that identifies weights."""


def refusal(model: Any) -> str:
    """Why a model cannot be served; else empty."""
    files = _files(model)
    return next((why for file, why in _REFUSED.items() if file in files), "")


def is_padded(model: Any) -> bool:
    """Whether a model is known to misread batches of sequences of different lengths."""
    return not _files(model).isdisjoint(_PADDED.split())


def computes_with_keys(model: Any) -> bool:
    """Whether a model is known to change keys between its cache and attention."""
    return bool({_FORMS.get(file) for file in _files(model)} & {"arrays", "latents"})


def layers_of(model: Any) -> int:
    """The number of a model's caches."""
    return len(stock_caches([model]))


def stock_caches(models: Sequence[Any]) -> list[Any]:
    """mlx_lm's own caches of each model, one after another."""
    return [one for model in models for one in mlx_lm_cache.make_prompt_cache(model)]


def by_model(models: Sequence[Any], caches: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    """The model, and the draft model if there is one, each with its caches."""
    first = layers_of(models[0]) if len(models) > 1 else len(caches)
    return [*zip(models, ([*caches[:first]], [*caches[first:]]), strict=False)]


def handed(model: Any, packs: bool) -> str:
    """The form in which a model gets its rows, and masks; ``packs``: rows are quantised."""
    known = {_FORMS.get(file) for file in _files(model)}
    if not calls_attention(model):
        repeats = max(getattr(module, "repeats", 1) for module in model.modules())
        return "grouped" if "grouped" in known and repeats > 1 else "fused"
    return next((form for form in ("latents", "arrays") if packs and form in known), "packed")


def _files(model: Any) -> set[str]:
    """The files of mlx_lm.models that define the classes of a model."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    places = (cls.__module__.rpartition(".") for cls in classes)
    return {file for package, _, file in places if package == "mlx_lm.models"}


def facts_of(model: Any) -> dict[str, str]:
    """What the rows of a model depend on, as JSON: its settings, the scales of adapters, dtypes,
    and the fingerprint of its weights."""
    parts, own = model.modules(), args_of(model)
    found = {} if own is model else dict(vars(own))
    found["scales of adapters"] = sorted({one.scale for one in parts if "lora_a" in one})
    found["dtypes"] = sorted({str(one.weight.dtype) for one in parts if "weight" in one})
    found[WEIGHTS] = fingerprint(model)
    return {name: json.dumps(one, sort_keys=True, default=repr) for name, one in found.items()}


def fingerprint(model: Any) -> str:
    """The fingerprint of a model's weights: SHA-256 of the name, shape, kind and at most 16 evenly
    spread elements of each, in the order of their names.

    All floats count as float32, since ``load`` widens float16 on a CPU.
    """
    found = hashlib.sha256()
    for name, array in sorted(cast(Any, tree_flatten)(model.parameters())):
        real = mx.issubdtype(array.dtype, mx.floating)
        kind = "float" if real else str(array.dtype)
        some = array.reshape(-1)[:: max(1, array.size // 16)][:16]
        found.update(repr((name, array.shape, kind)).encode())
        found.update(np.array(some.astype(mx.float32) if real else some).tobytes())
    return found.hexdigest()[:32]
