"""What a model's caches will hold, from its settings and the header of its weights alone.

The model is built and its weights are mapped, but nothing is evaluated: one token in a graph shows
which arrays each layer keeps. So bytes follow from shapes, of any model, and no formula is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.utils import _get_classes, load_config, load_model

from ..demo import DEMO, model_path
from ..operations.arguments import dtype_name
from . import attention
from .generate import check_path, loading, widened
from .prompt_cache import evicting_caches, make_prompt_cache
from .routing import calls_attention

# mlx_lm has no types.
ArraysCache: Any = mlx_lm_cache.ArraysCache
CacheList: Any = mlx_lm_cache.CacheList

__all__ = ["Layer", "Outline", "configs", "outline_of", "outlined"]

CONFIGS = Path(__file__).with_name("models.json")
"""Settings of models that people run, by their names on the hub."""
_CONTEXT = ("max_position_embeddings", "model_max_length", "n_positions", "max_seq_len")


@dataclass(frozen=True)
class Layer:
    """What mlx_lm's cache of a layer keeps.

    row: bytes of a token.
    most: tokens that stay; None: all of them.
    state: bytes that do not depend on the text.
    dtype: of a token's.
    """

    row: int = 0
    most: int | None = None
    state: int = 0
    dtype: str = ""

    @property
    def grows(self) -> bool:
        return self.row > 0 and self.most is None

    def nbytes(self, tokens: int) -> int:
        """Bytes behind so many tokens."""
        return self.state + self.row * min(tokens, self.most or tokens)


class Outline:
    """Stands for a model where its caches are made and their bytes counted: it gives them rows of
    the model's shapes, and computes nothing.

    Args:
        model: an mlx_lm model; none of its weights is evaluated.
        config: its settings, as in ``config.json``.
    """

    def __init__(self, model: Any, config: Mapping[str, Any]) -> None:
        self._model, self._config = model, config
        self.args, self.model_type = model.args, getattr(model, "model_type", None)
        self.modules, self.parameters = model.modules, model.parameters
        caches = self.make_cache()
        model(mx.zeros((1, 1), mx.int32), cache=caches)
        self._kept = [_arrays(cache) for cache in caches]
        self.layers = [_layers(cache) for cache in caches]

    def make_cache(self) -> list[Any]:
        """mlx_lm's own caches."""
        found: list[Any] = mlx_lm_cache.make_prompt_cache(self._model)
        return found

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> None:
        """Have the caches take in so many tokens of one sequence."""
        for one, kept in zip(cache, self._kept, strict=True):
            _feed(one, kept, tokens.shape[1])

    @property
    def file(self) -> str:
        """The module of mlx_lm.models that it is made of."""
        return type(self._model).__module__.rpartition(".")[2]

    @cached_property
    def refused(self) -> str:
        """Why the caches here cannot serve the model; empty where they can."""
        try:
            make_prompt_cache(cast(Any, self), layers="equal")
        except ValueError as error:
            return str(error).partition("] ")[2]
        return ""

    @property
    def scored(self) -> bool:
        """Whether its attention can be had, without which policies that need scores are refused."""
        return calls_attention(cast(Any, self))

    @property
    def context(self) -> int | None:
        """The longest text that the model is made for, if its settings say."""
        parts = (self._config, self._config.get("text_config") or {})
        found = (part.get(name) for name in _CONTEXT for part in parts)
        return next((tokens for tokens in found if isinstance(tokens, int)), None)

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return sum(array.nbytes for _, array in cast(Any, tree_flatten)(self.parameters()))

    @property
    def growing(self) -> list[int]:
        """The layers whose caches grow with the text."""
        return [at for at, parts in enumerate(self.layers) if any(one.grows for one in parts)]

    @property
    def row(self) -> int:
        """Bytes of a token in the layers that grow."""
        return sum(one.row for parts in self.layers for one in parts if one.grows)

    def nbytes(self, tokens: int, **settings: Any) -> int:
        """Bytes of all caches behind so many tokens: mlx_lm's own, or, with ``settings``, those of
        :func:`make_prompt_cache`.

        Raises ValueError where the settings do not suit the model.
        """
        if not settings:
            return sum(one.nbytes(tokens) for parts in self.layers for one in parts)
        caches = make_prompt_cache(cast(Any, self), layers="equal", **settings)
        self(mx.zeros((1, tokens), mx.int32), caches)
        ours = sum(int(one.nbytes) for one in evicting_caches(caches))
        others = (one for parts in self.layers for one in parts if not one.grows)
        return ours + sum(one.nbytes(tokens) for one in others)


def outline_of(name: str) -> Outline:
    """The outline of a model: of a directory, "demo", a name of :func:`known`, or one on the hub,
    of which only the settings are fetched.

    Where there are no weights they are what the settings say, in 16 bits or quantised.

    Raises ValueError where there is no model of mlx_lm, or a file that is damaged.
    """
    check_path(name)
    folder = model_path() if name == DEMO else Path(name)
    if not folder.is_dir():
        if (config := known(name)) is not None:
            return outlined(config)
        with loading(folder):
            folder = Path(snapshot_download(name, allow_patterns=["*.json"]))
    with loading(folder):
        if not list(folder.glob("model*.safetensors")):
            return outlined(load_config(folder))
        model, config = load_model(folder, lazy=True)
        model.update(tree_map(widened, model.parameters()))
        return Outline(model, config)


def known(name: str) -> dict[str, Any] | None:
    """The settings of a model that people run, by its name on the hub or the end of that."""
    found = {key.lower(): config for key, config in configs().items()}
    ends = {key.rpartition("/")[2]: config for key, config in found.items()}
    return (found | ends).get(name.lower())


def configs() -> dict[str, dict[str, Any]]:
    """The settings of models that people run, by their names on the hub: of their ``config.json``
    what shapes depend on."""
    found: dict[str, dict[str, Any]] = json.loads(CONFIGS.read_text(encoding="utf-8"))
    return found


def outlined(config: dict[str, Any]) -> Outline:
    """The outline of a model of which there are only settings."""
    model_class, args = _get_classes(config)
    model = model_class(args.from_dict(config))
    _as_settings_say(model, config)
    return Outline(model, config)


def _as_settings_say(model: Any, config: Mapping[str, Any]) -> None:
    """Give random weights, which are float32, the form that they have in files."""
    model.update(tree_map(_in_16_bits, model.parameters()))
    said = config.get("quantization")
    if isinstance(said, dict):
        size, bits = int(said["group_size"]), int(said["bits"])

        def fits(_: str, module: Any) -> bool:
            return hasattr(module, "to_quantized") and module.weight.shape[-1] % size == 0

        nn.quantize(model, size, bits, mode=said.get("mode", "affine"), class_predicate=fits)


def _in_16_bits(weight: mx.array) -> mx.array:
    return weight.astype(mx.bfloat16) if weight.dtype == mx.float32 else weight


def _arrays(cache: Any) -> Any:
    """What a cache keeps after a token: keys and values, other arrays, or a list of those of its
    parts."""
    if isinstance(cache, CacheList):
        return [_arrays(part) for part in cache.caches]
    return cache.state if isinstance(cache, ArraysCache) else (cache.keys, cache.values)


def _layers(cache: Any) -> list[Layer]:
    if isinstance(cache, CacheList):
        return [one for part in cache.caches for one in _layers(part)]
    if isinstance(cache, ArraysCache):
        return [Layer(state=cache.nbytes)]
    most = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
    if cache.keys is None:  # of a layer that reads those of another
        return [Layer()]
    row = sum(array.nbytes // array.shape[2] for array in (cache.keys, cache.values))
    return [Layer(row, most, dtype=dtype_name(cache.keys.dtype))]


def _feed(cache: Any, kept: Any, tokens: int) -> None:
    if isinstance(cache, CacheList):
        for part, own in zip(cache.caches, kept, strict=True):
            _feed(part, own, tokens)
    elif isinstance(cache, ArraysCache):
        cache.state = kept
    elif kept[0] is not None:
        keys, values = (
            mx.zeros((1, one.shape[1], tokens, one.shape[3]), one.dtype) for one in kept
        )
        queries = keys
        keys, values = cache.update_and_fetch(keys, values)
        if list(evicting_caches([cache])):
            latent = cache.config.kv_handed == "latents" and isinstance(keys, tuple)
            attention.attend(
                lambda **_: queries, queries, keys, keys if latent else values, cache=cache
            )
