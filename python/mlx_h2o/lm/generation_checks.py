"""Checks of generation's arguments before anything is computed: MLX reads out of bounds for a token
id outside the embedding table, and with some numbers mlx_lm's loops never end."""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.sample_utils import greedy_sampler

from .models import by_model, layers_of
from .routing import evicting_caches, held_tokens, int_setting, model_name, parts_of

COUNTS = {"prefill_step_size", "num_draft_tokens", "prefill_batch_size", "completion_batch_size"}
"""Arguments of mlx_lm's generation that are counts."""


def vocabulary(model: Any) -> int:
    """The size of a model's vocabulary, or the most it could be if the model does not say."""
    return int_setting(model, "vocab_size", "num_vocab") or 2**31


def within_all(models: Sequence[Any]) -> list[Callable[..., Any]]:
    """Logits processors that leave only tokens of all models: MLX does not check token ids."""
    rows = {*map(vocabulary, models)}
    return [lambda _, logits: logits[..., : min(rows)]] if len(rows) > 1 else []


class Draws:
    """The sampler of generation's arguments. If it, or a logits processor, is not mlx_lm's own, a
    token id outside the vocabulary is not looked up; :meth:`check` refuses it."""

    def __init__(self, operation: str, given: dict[str, Any], models: Sequence[Any]) -> None:
        own = [given.get("sampler") or greedy_sampler, *(given.get("logits_processors") or ())]
        places = {getattr(one, "__module__", None) for one in own}
        self._is_own = places != {greedy_sampler.__module__}
        self._operation, self._sampler = operation, own[0]
        self._rows, self._chosen = min(map(vocabulary, models)), list[mx.array]()

    def __call__(self, logprobs: mx.array) -> mx.array:
        ids: mx.array = self._sampler(logprobs)
        if not self._is_own:
            return ids
        self.check(2)
        self._chosen.append(ids.astype(mx.int64))  # smaller kinds may not hold the vocabulary
        return mx.where((self._chosen[-1] >= 0) & (self._chosen[-1] < self._rows), ids, 0)

    def check(self, ahead: int) -> None:
        """Raises ValueError for an id outside the vocabulary; leaves the newest ``ahead`` choices,
        which the model may not have made yet."""
        while len(self._chosen) > ahead:
            for one in cast(list[int], self._chosen.pop(0).flatten().tolist()):
                if not 0 <= one < self._rows:
                    said = f"the sampler chose the token id {one}, expected 0 to {self._rows - 1}."
                    raise ValueError(f"[{self._operation}] {said}")


def checked_tokens(operation: str, name: str, tokens: Any, models: Sequence[Module]) -> list[int]:
    """The token ids of a list or an array.

    Raises:
        ValueError: no tokens, or not those of one sequence; an id outside the vocabulary of one of
            the models; a draft model with another vocabulary.
    """
    rows = [vocabulary(model) for model in models]
    if max(rows) - min(rows) >= 1024:  # a smaller difference is padding
        said = f"draft_model knows {rows[1]} tokens, expected {rows[0]} as the model."
        raise ValueError(f"[{operation}] {said}")
    try:
        found = np.array(tokens)  # of Python's ints if one exceeds 64 bits
    except (TypeError, ValueError):  # lists of different lengths
        found = np.array(None)
    if found.ndim != 1 or (found.dtype.kind not in "iu" and {*map(type, found)} - {int}):
        said = f"{found.dtype} of shape {found.shape}" if found.ndim else f"{tokens!r:.80}"
        wanted = "token ids, such as tokenizer.encode returns"
        raise ValueError(f"[{operation}] {name} is {said}, expected {wanted}.")
    if not found.size:
        raise ValueError(f"[{operation}] {name} is empty, expected at least one token.")
    for one in (found.min(), found.max()):
        if not 0 <= one < min(rows):
            said = f"{name} has the token id {one!s:.80}"
            raise ValueError(f"[{operation}] {said}, expected 0 to {min(rows) - 1}.")
    return cast(list[int], found.tolist())


def check_drafts(operation: str, caches: Any, model: Module, seen: int | None) -> None:
    """Raises ValueError if these caches, of the model and then of its draft model, cannot trim
    rejected drafts once they have seen ``seen`` tokens (None: any number): full windows and states
    cannot. Also if the model has not one for each layer, since mlx_lm takes those of the draft
    model from there on."""
    if (count := layers_of(model)) != (layers := len(cast(Any, model).layers)):
        said = f"{model_name(model)} has {count} caches for {layers} layers."
        raise ValueError(f"[{operation}] draft_model is given, expected None: {said}")
    for whose, own in ((model_name(model), caches[:count]), ("the draft model", caches[count:])):
        for one in parts_of(own):
            most = getattr(one, "max_size", math.inf) - 1 - one.offset if one.is_trimmable() else 0
            if (math.inf if seen is None else seen) > most:
                many = "any number of" if seen is None else f"{seen:,}"
                said = f"max_tokens makes {many} tokens with the prompt, expected at most {most:,}"
                why = f"the {type(one).__name__} of {whose} cannot take back more"
                raise ValueError(f"[{operation}] {said} with a draft model: {why}.")


def check_caches(operation: str, caches: Any, models: Sequence[Module], drafted: int = 0) -> None:
    """Raises ValueError unless these are one cache for each layer of the models, each made for that
    layer and given once, all of a model after the same number of tokens, which can trim ``drafted``
    tokens even after evictions."""
    counts = [(model_name(model), layers_of(model)) for model in models]
    expected = [f"{name} layer {layer}" for name, count in counts for layer in range(count)]
    known = isinstance(caches, list | tuple)
    if not known or len(caches) != len(expected):
        found = f"{len(caches)} caches" if known else f"a {type(caches).__name__}"
        wanted = f"{len(expected)} caches, one for each layer of"
        both = " and ".join(name for name, _ in counts)
        raise ValueError(f"[{operation}] prompt_cache is {found}, expected {wanted} {both}.")
    for layer, (cache, of) in enumerate(zip(caches, expected, strict=True)):
        own = (one.name.partition(" KV heads ")[0] for one in evicting_caches([cache]))
        names = {name for name in own if " layer " in name} - {of}  # Swift's names differ
        twice = any(cache is other for other in caches[:layer])
        if names or twice or not hasattr(cache, "state"):
            said = "there twice" if twice else f"of {min(names)}" if names else repr(cache)
            found = f"prompt_cache[{layer}] is {said}"
            raise ValueError(f"[{operation}] {found}, expected a cache of {of}.")
    for _, layers in by_model(models, caches):
        if len(seen := {*held_tokens(layers)}) > 1:
            said = f"prompt_cache has layers after {min(seen)} and after {max(seen)} tokens"
            wanted = "as many in all: a step was interrupted, make new caches"
            raise ValueError(f"[{operation}] {said}, expected {wanted}.")
    for cache in evicting_caches(caches):
        if (allowed := cache.config.speculative) < drafted:
            said = f"the prompt cache holds a {type(cache).__name__} with speculative={allowed}"
            why = f"whose evicted rows cannot come back when {drafted} drafts are rejected"
            wanted = f"caches made with speculative={drafted} or more"
            raise ValueError(f"[{operation}] {said}, {why}: expected {wanted}.")
