"""Prompt caches in files: safetensors as mlx_lm writes them, with one more entry.

The entry holds the format, the version of this package, the number of layers, a checksum and, if
the model was given, facts that identify it. This package also reads files of its caches that mlx_lm
wrote; mlx_lm does not know their classes, and refuses either kind of file by name.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_unflatten
from mlx_lm.models import cache as mlx_lm_cache

from ..caches.cache import BatchH2OKVCache, H2OKVCache, QuantizedH2OKVCache
from ..caches.heads import HeadGroups
from ..version import __version__
from .files import UNKNOWN, is_whole, replacing, texts_of, write_checksum
from .models import WEIGHTS, facts_of, layers_of
from .routing import check_given, evicting_caches, model_name

FORMAT = 6
"""Files of a higher format are refused. Raised when older readers would misread a file."""

_CLASSES: dict[str, Any] = {
    cls.__name__: cls for cls in (H2OKVCache, QuantizedH2OKVCache, BatchH2OKVCache, HeadGroups)
} | {  # names in files of earlier versions
    "SpeculativeH2OKVCache": H2OKVCache,
    "SpeculativeQuantizedH2OKVCache": QuantizedH2OKVCache,
}
"""The caches of this package by their names in files."""

_ENTRY = "mlx_h2o"
_SUFFIX = ".safetensors"


def save_prompt_cache(
    file_name: str | os.PathLike[str], cache: Sequence[Any],
    metadata: dict[str, str] | None = None, *, model: Module | None = None,
) -> None:  # fmt: skip
    """Write a prompt cache to a ``.safetensors`` file, atomically.

    The file is written under a temporary name and renamed, so that an interruption leaves the old
    file, if any, unchanged. Rows beyond the budget are evicted first. Shared rows are written in
    full.

    Args:
        file_name: the file to write, readable only by this user; ``.safetensors`` is added if it
            is missing, as in mlx_lm.
        cache: one cache per layer, such as those of ``make_prompt_cache``.
        metadata: texts to store with it.
        model: the model that the cache belongs to, so that loading can check it.

    Raises:
        ValueError: no caches, metadata that is not text, or a cache that cannot be saved.
        OSError: the file cannot be written; the error names it.
    """
    op = "[save_prompt_cache]"
    if not isinstance(cache, list | tuple) or not cache:
        found = "no" if isinstance(cache, list | tuple) else f"a {type(cache).__name__} for"
        raise ValueError(f"{op} found {found} caches, expected one per layer.")
    metadata = dict(metadata or {})
    # mlx_lm reads a dot in a name as a level of a tree.
    named = {name for name in metadata if isinstance(name, str) and "." not in name} - {_ENTRY}
    texts = {name for name, text in metadata.items() if isinstance(text, str)}
    if wrong := [name for name in metadata if name not in named & texts]:
        wanted = f"texts named by texts without dots, none of them {_ENTRY!r}"
        raise ValueError(f"{op} metadata holds {wrong}, expected {wanted}.")
    for layer, one in enumerate(cache):
        if not hasattr(one, "state") or not hasattr(type(one), "from_state"):
            said = f"layer {layer} is a {type(one).__name__}, expected a cache with a state."
            raise ValueError(f"{op} {said}")
    cache = [one.unshared() if hasattr(one, "unshared") else one for one in cache]
    about: dict[str, Any] = {"format": FORMAT, "version": __version__, "layers": len(cache)}
    about["checksum"] = UNKNOWN
    if model is not None:
        check_given("save_prompt_cache", model)
        about |= {"model": model_name(model), "facts": facts_of(model)}
    metadata[_ENTRY] = json.dumps(about)
    path = Path(with_suffix(file_name))
    with replacing(path, 0o600, _SUFFIX) as beside:  # for this user alone: it holds a conversation
        mlx_lm_cache.save_prompt_cache(str(beside), list(cache), metadata)
        write_checksum(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())


def with_suffix(file_name: str | os.PathLike[str]) -> str:
    """The path of a prompt cache: a missing ``.safetensors`` is added, as in mlx_lm."""
    path = os.fsdecode(file_name)
    named = os.path.basename(path)  # otherwise it is a folder
    return path + _SUFFIX if named and not path.endswith(_SUFFIX) else path


def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: bool = False, *, model: Module | None = None
) -> Any:
    """Load a prompt cache from a file, with its settings.

    Args:
        file_name: a file written by ``save_prompt_cache``, or by mlx_lm's function of this name.
        return_metadata: return ``(cache, metadata)``.
        model: the model to use the cache with; a file that was saved with another is refused.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, is not a prompt cache, has a later format, belongs to
            another model, or holds no evicting cache.
    """
    path, text = _texts(file_name)
    description = _description(path, text.get(f"0.{_ENTRY}", '{"format": 0}'))  # mlx_lm's have none
    for name in [text[key] for key in text if key.startswith("1.")]:
        if name not in _CLASSES and not isinstance(getattr(mlx_lm_cache, name, None), type):
            known = f"caches of mlx_lm and {', '.join(_CLASSES)}"
            raise _unfit(path, f"holds a {name!r}, expected {known}")
    checksum = description.get("checksum")
    if checksum is not None and not is_whole(path, str(checksum)):
        raise _unfit(path, "is damaged: it is not what was written")
    cache, metadata = _read(path)
    if description.get("layers", len(cache)) != len(cache):
        raise _unfit(path, f"holds {len(cache)} layers, expected {description['layers']}")
    evicting = list(evicting_caches(cache))
    if not evicting:
        raise _unfit(path, "holds no cache that evicts: expected mlx_lm to load it")
    if len({one.config.max_kv_size for one in evicting}) > 1:
        for one in evicting:  # files of format 1 do not say so
            one.unequal_budgets = True
    if model is not None:
        _check_model(path, description, cache, model)
    metadata = {key: value for key, value in metadata.items() if key != _ENTRY}
    return (cache, metadata) if return_metadata else cache


def saved_texts(file_name: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a file of ``save_prompt_cache``, without reading its caches."""
    return {key[2:]: one for key, one in _texts(file_name)[1].items() if key.startswith("0.")}


def _texts(file_name: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """The path of a prompt cache, and all texts in its header."""
    path = os.fsdecode(file_name) if os.path.exists(file_name) else with_suffix(file_name)
    text = texts_of(path, "load_prompt_cache")
    if not any(key.startswith("1.") for key in text):
        raise _unfit(path, "is not a prompt cache: it names no cache classes")
    return path, text


def _read(path: str) -> tuple[list[Any], dict[str, str]]:
    """The caches and metadata of a file, as mlx_lm writes them: states are arrays, and a list names
    the kinds of those that encode something else."""
    unflatten: Any = tree_unflatten
    try:
        arrays, texts = cast(Any, mx.load)(path, return_metadata=True)
        metadata, names, kinds = unflatten(list(texts.items()))
        for place, kind in kinds[1:]:
            arrays[place] = _KINDS[kind](arrays[place])
        states = unflatten(list(arrays.items()))
        return [_restored(*pair) for pair in zip(names, states, strict=True)], metadata or {}
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _unfit(path, f"cannot be read: {error}") from error


_KINDS: dict[str, Callable[[mx.array], Any]] = {
    "scalar": lambda array: array.item(),
    "string": lambda array: "".join(map(chr, cast(Any, array.tolist()))),
    "none": lambda array: None,
}


def _restored(name: str, state: Any) -> Any:
    """A cache of this class and state."""
    if name == "CacheList":
        return mlx_lm_cache.CacheList(*(_restored(of, one) for one, of in state))
    cls: Any = _CLASSES.get(name) or getattr(mlx_lm_cache, name)
    return cls.from_state(state)


def _description(path: str, text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(text)
        format_ = int(found["format"])
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise _unfit(path, f"has a damaged entry {_ENTRY!r}: {text!r:.200}") from error
    if format_ > FORMAT:
        said = f"has format {format_}, written by mlx_h2o {found.get('version')}"
        raise _unfit(path, f"{said}: expected at most {FORMAT}, or a newer mlx_h2o to read it")
    return found


def _check_model(path: str, description: dict[str, Any], cache: list[Any], model: Any) -> None:
    check_given("load_prompt_cache", model)
    name, layers = model_name(model), layers_of(model)
    if len(cache) != layers:
        raise _unfit(path, f"holds {len(cache)} layers, expected {layers} as {name} has")
    of = description.get("model", next(evicting_caches(cache)).name.rpartition(" layer ")[0])
    if of not in ("", name):
        raise _unfit(path, f"is of the model {of}, expected {name}")
    # Earlier versions wrote only the fingerprint, and the first ones a shorter one, of shapes.
    earlier = description.get("fingerprint", "")
    told = description.get("facts", {WEIGHTS: f'"{earlier}"'} if len(earlier) == 32 else {})
    facts = facts_of(model) if told else {}  # reads a part of all weights
    for fact, found in told.items():
        if found != (expected := facts.get(fact, found)):
            raise _unfit(path, f"is of a {of} model with {fact} = {found}, expected {expected}")


def _unfit(path: str, problem: str) -> ValueError:
    return ValueError(f"[load_prompt_cache] {path} {problem}.")
