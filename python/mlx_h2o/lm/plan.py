"""What a model's caches will hold, from its settings and the header of its weights alone.

The model is built and its weights are mapped, but nothing is evaluated (:mod:`.outline`).
"""

import json
import re
from collections.abc import Mapping
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from mlx_lm.utils import _get_classes, load_config, load_model

from .generate import loading, widen
from .models import refusal
from .outline import FAR, Outline, total_bytes
from .prompt_cache import make_prompt_cache
from .routing import context_length, model_name

_METHODS: dict[Any, Any] = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "pack-quantized": {"group_size": 32, "bits": 4},
} | {name: {"group_size": 128, "bits": 4} for name in ("awq", "gptq")}
"""How mlx_lm reads weights of other quantisation methods that it leaves packed."""
_DEPTHS, _MOST = ("num_hidden_layers", "num_layers", "n_layers", "n_layer"), 1000
"""What settings call the number of layers, and more than any model has: it would not be built."""
_STEP = 256
"""Tokens by which mlx_lm's caches grow at a time."""


class Plan(Outline):
    """The outline of a model, with facts from its settings.

    Args:
        model: an mlx_lm model; none of its weights is evaluated.
        config: its settings, as in ``config.json``.
        name: its full name on the hub, if the caller used a shorter one.

    Attributes:
        chats: whether it has a chat template, as far as is known.
        context: the context that the model was trained on, if its settings say.
        refused: why our caches cannot serve it; empty if they can.
    """

    def __init__(self, model: Any, config: Mapping[str, Any], name: str = "") -> None:
        super().__init__(model)
        self.name, self.chats, self.context = name, True, context_length(config)
        none = "" if self.heads else f"{model_name(model)} makes no plain KVCache"
        self.refused = refusal(model) or none

    @cached_property
    def rows(self) -> list[int]:
        """Bytes per token in each of mlx_lm's caches; 0 if it does not grow."""
        near, far = (self._filled(self.make_cache(), FAR + more) for more in (0, _STEP))
        return [(b.nbytes - a.nbytes) // _STEP for a, b in zip(near, far, strict=True)]

    def _filled(self, caches: list[Any], tokens: int) -> list[Any]:
        # Windows hold a whole chunk until the next one.
        return [*self.fed(caches, *((tokens - 1, 1) if tokens > 1 else (1,)))][-1]

    def nbytes(self, tokens: int, **settings: Any) -> int:
        """Bytes of all caches after this many tokens: mlx_lm's own, or, with ``settings``, those of
        :func:`make_prompt_cache`.

        Raises ValueError if the settings do not suit the model.
        """
        made = make_prompt_cache(cast(Any, self), layers="equal", **settings) if settings else None
        return total_bytes(self._filled(made or self.make_cache(), tokens))


def outline_of(name: str) -> Plan:
    """The outline of a model: a directory, "demo", a name of :func:`configs`, or a name on the hub,
    from which only the settings are fetched.

    Without weight files, the settings say how large the weights are, in 16 bits or quantised.

    Raises ValueError if there is no mlx_lm model, or a file is damaged.
    """
    with loading(name) as folder:
        if not folder.is_dir():
            if (found := _known(name)) is not None:
                return outlined(*found)
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja"]))
        if not list(folder.glob("model*.safetensors")):
            made = outlined(load_config(folder))
        else:
            model, config = load_model(folder, lazy=True)
            widen(model)
            made = Plan(model, config)
        said = (file.read_text("utf-8") for file in folder.glob("tokenizer_config.json"))
        made.chats = any(folder.glob("chat_template*")) or any("chat_template" in s for s in said)
        return made


def outlined(config: dict[str, Any], name: str = "") -> Plan:
    """The outline of a model from its settings alone."""
    return Plan(_built(config), config, name)


def random_model(name: str) -> Any | None:
    """A model of :func:`configs` with random weights, not yet evaluated; None if the name is
    unknown."""
    found = _known(name)
    return found and _built(found[0])


def _built(config: dict[str, Any]) -> Any:
    inside = config.get("text_config") or {}
    for name, count in (config | inside).items():
        if name in _DEPTHS and isinstance(count, int) and count > _MOST:
            raise ValueError(f"{name} is {count}, expected at most {_MOST}.")
    model_class, args = _get_classes(config)
    model = model_class(args.from_dict(config))
    model.set_dtype(mx.bfloat16)
    packed = (inside | config).get("quantization_config") or {}
    # Of compressed-tensors the format says it, of ModelOpt the algorithm.
    kind = str(packed.get("format") or packed.get("quant_algo") or packed.get("quant_method"))
    method = _METHODS.get(kind.lower().removesuffix("-pack-quantized"), {})
    if said := config.get("quantization") or (method and method | packed):
        size, bits, mode = said["group_size"], said["bits"], said.get("mode", "affine")
        names = *(packed.get("modules_to_not_convert") or ()), *(packed.get("ignore") or ())
        dense = [name[3:] if name[:3] == "re:" else translate(f"{name}*") for name in names]
        dense += map(translate, ("*embed*", "*lm_head") if method else ())

        def fits(path: str, module: Any) -> Any:
            kept = any(re.match(one, path) for one in dense) or not hasattr(module, "to_quantized")
            return said.get(path, not kept and module.weight.shape[-1] % size == 0)

        cast(Any, nn).quantize(model, size, bits, mode=mode, class_predicate=fits)
    return model


def configs() -> dict[str, dict[str, Any]]:
    """The settings of models that people run, by their names on the hub: the parts of their
    ``config.json`` that shapes depend on."""
    text = Path(__file__).with_name("models.json").read_text(encoding="utf-8")
    return cast(dict[str, dict[str, Any]], json.loads(text))


def _known(name: str) -> tuple[dict[str, Any], str] | None:
    """Settings of :func:`configs` and the whole name, found by that name or its last part, also
    with a suffix such as "-4bit", as mlx-community has it."""
    stem = name.lower().removeprefix("mlx-community/")
    if quantised := re.fullmatch(r"(.+)-([2-8])bit", stem):
        stem = quantised[1]
    for key, config in configs().items():
        if stem in (key.lower(), (end := key.rpartition("/")[2]).lower()):
            if not quantised:
                return config, key
            packed = {"group_size": 64, "bits": int(quantised[2])}
            config |= {"quantization": packed, "quantization_config": None}
            return config, f"mlx-community/{end}-{quantised[2]}bit"
    return None
