"""Strategies for a model: what makes their caches, how many rows they hold, and what those weigh.

Bytes are those of rows of 16 bits an element (float16, bfloat16), also where MLX computes on a CPU
and rows are float32 meanwhile. They are counted on caches of the real classes, filled with rows
that nobody computes: keys, values, scales, biases, scores and positions count, the room that
mlx_lm's caches allocate ahead does not. Caches that no strategy replaces, such as those of
sliding-window layers, are the same in every arm and do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import make_prompt_cache as stock_cache

from ..caches.cache import H2OKVCache
from ..caches.heads import HeadGroups
from ..lm.prompt_cache import evicting_caches, make_prompt_cache
from ..lm.sizing import least_rows, most_rows
from .strategies import KEEP, Strategy, parse

__all__ = ["Arm", "Footprint", "at_bytes_of", "resolve", "with_controls"]

# mlx_lm has no types.
KVCache: Any = mlx_lm_cache.KVCache
RotatingKVCache: Any = mlx_lm_cache.RotatingKVCache
QuantizedKVCache: Any = mlx_lm_cache.QuantizedKVCache
CacheList: Any = mlx_lm_cache.CacheList

MOST_ROWS = 2**20
"""Rows that `bytes=` asks for at most; beyond them a budget is no limit."""

SAME_BYTES = 0.95
"""The share of its bytes that an arm is compared at, at least."""

_MIXED_STEPS = 48
"""Steps after which mixed precision has packed its dense rows once."""


@dataclass(frozen=True)
class Arm:
    """A strategy for one model and length of text.

    name: how tables call it, files without their folders.
    rows: rows per head, None for the whole text.
    nbytes: bytes that it holds of the text, over all layers, at most.
    control: whether it is there to compare with, and was not asked for.
    evicts: whether the text is longer than its rows.
    """

    name: str
    strategy: Strategy
    rows: int | None
    nbytes: int
    evicts: bool
    make: Callable[[int], list[Any]]
    """Makes new caches, one per layer, for a seed."""
    control: bool = False


class Footprint:
    """The layers of a model whose caches a strategy replaces, and the bytes of such caches.

    Evaluates nothing.

    Attributes:
        shapes: per replaced cache: KV heads, and the sizes of a key and of a value.
        vocabulary: number of logits.
    """

    def __init__(self, model: Any) -> None:
        caches = stock_cache(model)
        self.model = model
        self.vocabulary = int(model(mx.array([[0]]), cache=caches).shape[-1])
        self.shapes = [
            (cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3])
            for cache in _plain(caches)
            if cache.keys is not None
        ]
        if not self.shapes:
            raise ValueError("the model makes no plain KVCache, expected at least one to replace")

    def stock(self, make: Callable[[tuple[int, int, int]], Any]) -> list[Any]:
        """mlx_lm's caches of the model, the plain ones among them as `make` makes them."""
        shapes = iter(self.shapes)
        return [_replaced(cache, lambda: make(next(shapes))) for cache in stock_cache(self.model)]

    def held(self, caches: Sequence[Any], tokens: int) -> int:
        """Bytes at most, at rest, when so many tokens have been read; fills the caches."""
        served = list(_served(caches))
        if len(served) != len(self.shapes):
            raise ValueError("the model links its caches, whose bytes are not counted here")
        found: dict[Any, int] = {}
        total = 0
        for cache, shape in zip(served, self.shapes, strict=True):
            key = shape, type(cache), getattr(cache, "config", None)
            if key not in found:
                found[key] = _filled(cache, shape, tokens)
            total += found[key]
        return total


def resolve(footprint: Footprint, strategy: Strategy, tokens: int) -> Arm:
    """The strategy for this model and texts of so many tokens.

    Raises ValueError: fewer bytes than its least rows take, or a model that it cannot serve.
    """
    try:
        return _resolve(footprint, strategy, tokens)
    except ValueError as error:
        raise ValueError(f"strategy {strategy.name!r}: {error}") from error


def with_controls(
    footprint: Footprint, arms: Sequence[Arm], tokens: int
) -> tuple[list[Arm], list[str]]:
    """`arms` with what they must be compared with, and which of that the model cannot do, in words.

    The full cache comes first. Beside each arm of ours stand a rotating window of float16 rows and
    a random choice of rows, of the same bytes or up to 5 % less; last mlx_lm's caches of 8 and of
    4 bits.
    """
    found = list(arms)
    missing = []

    def add(name: str) -> None:
        try:
            arm = replace(resolve(footprint, parse(name), tokens), control=True)
        except ValueError as error:
            missing.append(str(error))
        else:
            found.extend([arm] if arm.name not in {other.name for other in found} else [])

    # The smallest first: what is a little smaller serves the next ones too.
    for arm in sorted(arms, key=lambda one: one.nbytes):
        capacity = _capacity(footprint, arm)
        for name in ("rotating", "random"):
            served = any(
                name in (other.strategy.kind, other.strategy.policy) and at_bytes_of(arm, other)
                for other in found
            )
            if capacity is not None and not served:
                add(f"{name}:bytes={capacity}")
    for name in ("kv8", "kv4", "full"):
        add(name)
    found.sort(key=lambda arm: arm.name != "full")
    return found, missing


def at_bytes_of(arm: Arm, other: Arm) -> bool:
    """Whether `other` holds nearly the bytes of `arm`, and no more."""
    return SAME_BYTES * arm.nbytes <= other.nbytes <= arm.nbytes


def _capacity(footprint: Footprint, arm: Arm) -> int | None:
    """Bytes that a bounded arm of ours may hold of any text."""
    if arm.strategy.kind != "ours" or arm.rows is None:
        return None
    return _when_full(footprint, arm.make(0), arm.rows)


def _resolve(footprint: Footprint, strategy: Strategy, tokens: int) -> Arm:
    making = _MAKERS[strategy.kind](footprint, strategy, tokens)
    rows = strategy.rows
    if strategy.nbytes is not None:
        least = KEEP + 1 if strategy.kind == "rotating" else least_rows(strategy.settings)
        rows = most_rows(
            lambda rows: _when_full(footprint, making(rows, 0), rows),
            least,
            strategy.nbytes,
            name="bytes",
            most=MOST_ROWS,
        )

    def make(seed: int) -> list[Any]:
        return making(rows, seed)

    fewest = _fewest_rows(make(0)) if strategy.kind == "ours" else rows
    nbytes = footprint.held(make(0), tokens)
    name = strategy.name
    if strategy.nbytes is not None:
        name = name.replace(f"bytes={strategy.nbytes}", str(rows), 1)
    if file := strategy.budgets:
        name = name.replace(f"={file}", f"={Path(file).name}")
    return Arm(name, strategy, rows, nbytes, fewest is not None and fewest < tokens, make)


def _fewest_rows(caches: Sequence[Any]) -> int | None:
    """The fewest rows of any layer, where budgets differ; None: no layer has a limit."""
    sizes = [cache.config.max_kv_size for cache in evicting_caches(caches)]
    return min((size for size in sizes if size is not None), default=None)


Making = Callable[[int | None, int], list[Any]]
"""Makes caches of so many rows, with a seed."""


def _full(footprint: Footprint, strategy: Strategy, tokens: int) -> Making:
    return lambda rows, seed: footprint.stock(lambda shape: KVCache())


def _rotating(footprint: Footprint, strategy: Strategy, tokens: int) -> Making:
    def make(rows: int | None, seed: int) -> list[Any]:
        if rows is None or rows <= KEEP:
            raise ValueError(f"{rows} rows, expected more than {KEEP}")
        return footprint.stock(lambda shape: RotatingKVCache(max_size=rows, keep=KEEP))

    return make


def _quantised(footprint: Footprint, strategy: Strategy, tokens: int) -> Making:
    bits = strategy.settings["kv_bits"]

    def one(shape: tuple[int, int, int]) -> Any:
        for size in (64, 32):
            if shape[1] % size == 0 and shape[2] % size == 0:
                return QuantizedKVCache(group_size=size, bits=bits)
        raise ValueError(f"rows of {shape[1]} and {shape[2]} elements, expected multiples of 32")

    return lambda rows, seed: footprint.stock(one)


def _ours(footprint: Footprint, strategy: Strategy, tokens: int) -> Making:
    given: dict[str, Any] = {"budgets": strategy.budgets, "layers": strategy.layers}
    given["length"] = tokens

    def make(rows: int | None, seed: int) -> list[Any]:
        return make_prompt_cache(footprint.model, strategy.config(rows, seed), **given)

    return make


_MAKERS = {"full": _full, "rotating": _rotating, "quantised": _quantised, "ours": _ours}


def _when_full(footprint: Footprint, caches: Sequence[Any], rows: int) -> int:
    """Bytes of caches that have read enough, also where layers have more than ``rows``."""
    of_layers = [cache.config.max_kv_size or 0 for cache in evicting_caches(caches)]
    return footprint.held(caches, 2 * max([rows, *of_layers]))


def _plain(caches: Sequence[Any]) -> Iterator[Any]:
    """mlx_lm's unbounded caches, those in lists included."""
    for cache in caches:
        if type(cache) is KVCache:
            yield cache
        elif type(cache) is CacheList:
            yield from _plain(cache.caches)


def _served(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches that stand where plain ones would."""
    for cache in caches:
        if isinstance(cache, (KVCache, RotatingKVCache, QuantizedKVCache, H2OKVCache, HeadGroups)):
            yield cache
        elif isinstance(cache, CacheList):
            yield from _served(cache.caches)


def _replaced(cache: Any, make: Callable[[], Any]) -> Any:
    if type(cache) is KVCache:
        return make()
    if type(cache) is CacheList:
        return CacheList(*(_replaced(part, make) for part in cache.caches))
    return cache


def _filled(cache: Any, shape: tuple[int, int, int], tokens: int) -> int:
    """Bytes at most, at rest, of a cache that reads so many tokens."""
    if isinstance(cache, H2OKVCache):
        return _filled_ours(cache, shape, tokens)
    if isinstance(cache, HeadGroups):
        groups = zip(cache.caches, cache.heads, strict=True)
        return sum(_filled_ours(one, (len(heads), *shape[1:]), tokens) for one, heads in groups)
    cache.update_and_fetch(*_rows(shape, tokens))
    if isinstance(cache, RotatingKVCache):
        cache.update_and_fetch(*_rows(shape, 1))  # which lets go of the chunk's surplus
        return _at(cache, min(tokens, cache.max_size))
    return _at(cache, tokens)


def _at(cache: Any, rows: int) -> int:
    """The bytes of so many of the rows that are allocated."""
    allocated = (cache.keys[0] if isinstance(cache.keys, tuple) else cache.keys).shape[2]
    nbytes: int = int(cache.nbytes) * rows // int(allocated)
    return nbytes


def _filled_ours(cache: H2OKVCache, shape: tuple[int, int, int], tokens: int) -> int:
    budget = cache.config.max_kv_size
    steps = 1 if not cache.config.mixed else _MIXED_STEPS + cache.config.group
    if budget is None or tokens <= budget:
        steps = 0
    else:
        tokens = budget + 1
    most = 0
    for length in (tokens, *[1] * steps):
        cache.update_and_fetch(*_rows(shape, length))
        if cache.policy.needs_scores:
            scored = min(length, 128)
            cache.update_scores(mx.zeros((1, shape[0], scored, cache.size())))
        cache.attended()
        cache.flush()
        most = max(most, cache.nbytes)
    return most


def _rows(shape: tuple[int, int, int], count: int) -> tuple[mx.array, mx.array]:
    heads, key, value = shape
    return (
        mx.zeros((1, heads, count, key), mx.float16),
        mx.zeros((1, heads, count, value), mx.float16),
    )
