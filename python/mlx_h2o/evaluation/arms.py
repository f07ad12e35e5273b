"""Arms of a comparison: kinds of caches, each sized to the same bytes.

Bytes are counted for rows of 16 bits an element (float16, bfloat16), even if MLX computes on a CPU,
where rows are float32. Keys, values, scales, biases, scores and positions count; the room that
mlx_lm's caches allocate ahead does not. Only caches that grow with the text count: sliding windows
and the states of recurrences are the same in every arm.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as stock_cache

from ..config import H2OConfig, setting_names
from ..errors import LARGEST
from ..lm.layers import read_budgets
from ..lm.outline import FAR, Outline, total_bytes
from ..lm.prompt_cache import NAMES, make_prompt_cache
from ..lm.routing import evicting_caches

KEEP = 4
"""First rows that mlx_lm's rotating cache never overwrites."""

PROMPT = 32
"""Tokens of a text that are read before the first is predicted. Their rows stay in "prompt-random",
which evicts the others at random."""

REFUSALS = AttributeError, RuntimeError, TypeError, ValueError
"""What a model raises that cannot read an arm's caches, or cannot have them."""

_OF_CACHES = {*NAMES, "length"} - {*setting_names()}  # not settings of a single cache


@dataclass(frozen=True)
class Arm:
    """A kind of cache.

    kind: "full", "window" and "stock" are mlx_lm's: KVCache, RotatingKVCache and QuantizedKVCache;
        "ours" is `make_prompt_cache` with `settings` and as many bytes as the others.
    settings: with `max_kv_size`, `budgets` or `max_kv_bytes` among them, the arm has its own size;
        "window" takes only `max_kv_size`, and "stock" only `bits`.
    """

    name: str
    kind: str = "ours"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sized(self) -> bool:
        """Whether the comparison sets its bytes."""
        own = self.settings.keys() & {"max_kv_size", "max_kv_bytes", "budgets"}
        return self.kind in ("window", "ours") and not own


def _framed(bits: int, v_bits: int, newest: int = 0) -> Arm:
    """All rows, quantised in the frames of their heads, except for the newest."""
    settings = {"policy": "keydiff", "max_kv_size": None, "kv_bits": bits, "v_bits": v_bits}
    said = f"+{newest}" if newest else ""
    return Arm(f"K{bits}V{v_bits}{said}", settings=settings | {"dense_size": newest})


def alone(**settings: Any) -> dict[str, Any]:
    """A policy as its authors use it: unquantised rows, no folding, as many in every layer."""
    return {"kv_bits": None, "fold": False, "layers": "equal"} | settings


ARMS = {
    arm.name: arm
    for arm in (
        Arm("full", "full"),
        Arm("window", "window"),
        Arm("kv8", "stock", {"bits": 8}),
        Arm("kv4", "stock", {"bits": 4}),
        *(_framed(*bits) for bits in ((8, 4), (8, 4, 8), (6, 5), (5, 4), (5, 4, 8))),
        Arm("random", settings=alone(policy="random")),
        Arm("prompt-random", settings=alone(policy="random", sink_size=PROMPT)),
        Arm("keydiff", settings=alone(policy="keydiff")),
        Arm("h2o-ema", settings=alone(policy="h2o-ema")),
        Arm("ours"),
        Arm("no-frame", settings={"kv_frame": False}),
        Arm("no-mass", settings={"policy": "keydiff"}),
        Arm("no-fold", settings={"fold": False}),
        Arm("no-layers", settings={"layers": "equal"}),
    )
}
"""All arms: mlx_lm's caches, controls, `--max-kv-bytes` alone ("ours"), and the same without each
of its parts."""

DEFAULT = tuple(ARMS[name] for name in ("full", "window", "kv8", "kv4", "keydiff", "ours"))


def parsed(text: str) -> Arm:
    """An arm as people write it: a name of ARMS, or "NAME: SETTING=VALUE SETTING=VALUE ...".

    Raises ValueError with one line that names the text and what was expected.
    """
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if not colon:
        if name not in ARMS:
            wanted = f"one of {', '.join(ARMS)}, or 'NAME: SETTING=VALUE ...'"
            raise ValueError(f"arm {name!r} is unknown, expected {wanted}")
        return ARMS[name]
    settings = {}
    for part in rest.split():
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise ValueError(f"arm {text!r}: found {part!r}, expected SETTING=VALUE")
        try:
            settings[key] = json.loads(value.lower().replace("none", "null"))
        except json.JSONDecodeError:
            settings[key] = value
    if name in ARMS:
        raise ValueError(f"arm {text!r}: the name is taken, expected another than {name!r}")
    try:
        if isinstance(settings.get("budgets"), str):  # files change, and a result would not say so
            settings["budgets"] = read_budgets(settings["budgets"])
        own = {key: settings[key] for key in settings.keys() - _OF_CACHES}
        H2OConfig.of(**{"max_kv_size": LARGEST} | own)  # the bytes decide how many fit
    except ValueError as error:
        raise ValueError(f"arm {text!r}: {str(error).partition('] ')[2]}") from error
    return Arm(name, settings=settings)


@dataclass(frozen=True)
class ArmCaches:
    """An arm's caches for texts of one length."""

    make: Callable[[], list[Any]]  # makes new caches, one per layer
    nbytes: int  # the most that they hold while the text is read, over all layers that grow


class Sizes:
    """Makes the caches of arms for a model, and counts their bytes. Evaluates nothing itself."""

    def __init__(self, model: Any, seed: int = 0) -> None:
        self._model, self._seed, self._outline = model, seed, Outline(model, narrow=True)
        self._known: dict[tuple[str, int, int], ArmCaches] = {}
        self._plain = stock_cache(model)
        (filled,) = self._outline.fed(stock_cache(model), 1)
        rows = [part for one in _growing(self._plain, filled) for part in (one.keys, one.values)]
        if not rows:
            raise ValueError("the model makes no plain KVCache, expected at least one to replace")
        self._group = 32 if any(part.shape[-1] % 64 for part in rows) else 64

    def full(self, tokens: int) -> int:
        """Bytes of the full cache."""
        return self._held(stock_cache(self._model), tokens)

    def made(self, arm: Arm, tokens: int, nbytes: int) -> ArmCaches:
        """The caches of an arm for texts of this many tokens.

        Raises ValueError if settings are refused, or there are fewer bytes than it needs.
        """
        key = arm.name, tokens, nbytes
        if key not in self._known:
            make = partial(self._stock, arm, nbytes * tokens // self.full(tokens))
            if arm.kind == "ours":
                make = partial(copy.deepcopy, self._ours(arm, tokens, nbytes))
            self._known[key] = ArmCaches(make, self._held(make(), tokens))
        return self._known[key]

    def _stock(self, arm: Arm, rows: int) -> list[Any]:
        """mlx_lm's caches of an arm; ``rows`` is the size of a window that has none of its own."""
        rows = arm.settings.get("max_kv_size", rows)
        if arm.kind == "window" and rows <= KEEP:
            raise ValueError(f"the bytes are those of {rows} rows, expected more than {KEEP}")
        kinds: dict[str, Callable[[], Any]] = {
            "full": KVCache,
            "stock": partial(QuantizedKVCache, self._group, arm.settings.get("bits", 8)),
            "window": partial(RotatingKVCache, max_size=rows, keep=KEEP),
        }
        return with_growing(self._model, kinds[arm.kind])

    def _ours(self, arm: Arm, tokens: int, nbytes: int) -> list[Any]:
        """The largest caches that take at most `nbytes`, in rows of 16 bits."""
        settings = {"length": tokens, **arm.settings}
        if settings.get("policy") == "random":
            settings.setdefault("random_seed", self._seed)
        if arm.sized:  # besides what the caches that do not grow take once they are full
            *_, full = self._outline.fed(stock_cache(self._model), FAR, 1)
            growing = [*_growing(self._plain, full)]
            settings["max_kv_bytes"] = total_bytes(full) - total_bytes(growing) + nbytes
        return make_prompt_cache(cast(Any, self._outline), **settings)

    def _held(self, caches: list[Any], tokens: int) -> int:
        """The most bytes between steps once this many tokens have been read; fills the caches."""
        # Rows are evicted a group at a time, so look at all steps from one eviction to the next.
        settings = (one.config for one in evicting_caches(caches))
        evicting = (one.group for one in settings if one.max_kv_size and one.max_kv_size < tokens)
        steps = 1 + max(evicting, default=0)
        after = self._outline.fed(caches, max(1, tokens - steps), *[1] * steps)
        return max(sum(_nbytes(one, tokens) for one in _growing(self._plain, own)) for own in after)


def _growing(stock: Sequence[Any], caches: Sequence[Any]) -> Iterator[Any]:
    """The caches in place of those of mlx_lm's that grow."""
    for one, own in zip(stock, caches, strict=True):
        if type(one) is CacheList:
            yield from _growing(one.caches, own.caches)
        elif type(one) is KVCache:
            yield own


def with_growing(model: Any, make: Callable[[], Any]) -> list[Any]:
    """mlx_lm's caches of a model, with what this makes in place of each that grows."""

    def replaced(one: Any) -> Any:
        if type(one) is CacheList:
            return CacheList(*map(replaced, one.caches))
        return make() if type(one) is KVCache else one

    return [*map(replaced, stock_cache(model))]


def _nbytes(cache: Any, tokens: int) -> int:
    """Bytes of a cache, without the room that mlx_lm's caches allocate ahead."""
    if not isinstance(cache, (KVCache, RotatingKVCache, QuantizedKVCache)):
        return int(cache.nbytes)
    keys: Any = cache.keys[0] if isinstance(cache.keys, tuple | list) else cache.keys
    rows = int(min(tokens, cache.offset, getattr(cache, "max_size", tokens)))
    return int(cache.nbytes) * rows // int(keys.shape[2])
