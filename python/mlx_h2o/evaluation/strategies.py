"""Cache strategies as people write them: `rotating:256`, `keydiff:16MB:kv4`, `h2o:64:recent=16`.

    NAME [:ROWS] [:SIZE | :bytes=SIZE] [:kvBITS | :kvKEYS/VALUES | :FORMAT] [:SETTING=VALUE ...]

NAME is `full`, `rotating` (mlx_lm's `RotatingKVCache`), `kv2` to `kv8` (mlx_lm's
`QuantizedKVCache`, which holds the whole text) or a policy of this package. ROWS are rows per head,
`none` for no limit. A FORMAT is one of `kv_format`, such as `turbo3`. A SIZE such as 16MB or 300KiB
is what all layers may hold together. A SETTING is one of `H2OConfig`, by its name or as `sink`,
`heavy`, `recent`, `every`, `group`, `light`, `dense`, `guard` and `context`; `budgets` names a file
of budgets for each layer, `layers=equal` asks for the same rows for every KV head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .. import policies
from ..config import KV_FORMATS, H2OConfig
from ..lm.layers import LAYERS
from ..lm.sizing import parsed_bytes
from ..operations.validate_quantized import BITS

__all__ = ["DEFAULT_ROWS", "Strategy", "known_names", "parse"]

DEFAULT_ROWS = 256
KEEP = 4
"""First rows that mlx_lm's rotating cache never overwrites."""

Kind = Literal["full", "rotating", "quantised", "ours"]

_SHORT = {
    "sink": "sink_size",
    "heavy": "heavy_size",
    "recent": "recent_size",
    "every": "evict_every",
    "group": "kv_group_size",
    "light": "light_bits",
    "dense": "dense_size",
    "seed": "random_seed",
    "guard": "turbo_guard",
    "context": "context_size",
}
_SET_BY_PLACE = ("policy", "max_kv_size", "speculative", "kv_handed")
_TYPES = {
    field.name: str(field.type) for field in fields(H2OConfig) if field.name not in _SET_BY_PLACE
}


@dataclass(frozen=True)
class Strategy:
    """What a text such as "keydiff:256:kv4" asks for.

    name: the text, in one spelling.
    kind: "full", "rotating", "quantised" (of mlx_lm) or "ours".
    rows: rows per head; None: no limit, or what `nbytes` allows.
    nbytes: bytes over all layers; None: as many as the rows take.
    settings: of H2OConfig, `policy` and `max_kv_size` left out; of "quantised" only `kv_bits`.
    policy: of "ours".
    budgets: a file with a budget for each layer, or None.
    layers: how rows are shared out over the layers: "probe" or "equal".
    """

    name: str
    kind: Kind
    rows: int | None = None
    nbytes: int | None = None
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    policy: str = ""
    budgets: str | None = None
    layers: str = LAYERS[0]

    def config(self, rows: int | None, seed: int = 0) -> H2OConfig:
        """The settings for so many rows. `seed` is that of the policy "random", if none was set.

        Raises ValueError: settings that do not go together.
        """
        seeded = {"random_seed": seed} if self.policy == "random" else {}
        return H2OConfig(max_kv_size=rows, policy=self.policy, **(seeded | self.settings))

    @property
    def seeded(self) -> bool:
        """Whether another seed is another cache."""
        return self.policy == "random" and "random_seed" not in self.settings


def known_names() -> tuple[str, ...]:
    """What a strategy may begin with."""
    return ("full", "rotating", *(f"kv{bits}" for bits in BITS), *policies.names())


def parse(text: str) -> Strategy:
    """The strategy that a text asks for.

    Raises ValueError, of one line, that names the text and what was expected.
    """
    try:
        return _parse(text.strip())
    except ValueError as error:
        reason = str(error).removeprefix("[H2OConfig] ")
        raise ValueError(f"strategy {text!r}: {reason}") from error


def _parse(text: str) -> Strategy:
    name, *parts = (part.strip() for part in text.split(":"))
    if name == "full" or re.fullmatch(r"kv\d+", name):
        if name not in known_names():
            raise _unknown(name)
        if parts:
            raise ValueError(f"{name} is mlx_lm's cache of the whole text, expected no {parts[0]}")
        if name == "full":
            return Strategy("full", "full")
        return Strategy(name, "quantised", settings={"kv_bits": int(name[2:])})
    if name not in known_names():
        raise _unknown(name)
    found = _Parts(parts)
    if name == "rotating" and (found.settings or found.budgets or found.layers):
        raise ValueError("mlx_lm's rotating cache has rows or bytes, and no other settings")
    if found.nbytes is not None and (found.sized or found.budgets):
        raise ValueError("bytes and rows, expected one of them")
    rows = found.rows if found.sized else DEFAULT_ROWS
    if name == "rotating":
        if found.nbytes is None and (rows is None or rows <= KEEP):
            raise ValueError(f"{rows} rows, expected at least {KEEP + 1}: {KEEP} of them are fixed")
        given = None if found.nbytes is not None else rows
        return Strategy(_spelled(name, found), "rotating", given, found.nbytes)
    strategy = Strategy(
        _spelled(name, found),
        "ours",
        None if found.nbytes is not None else rows,
        found.nbytes,
        found.settings,
        name,
        found.budgets,
        found.layers or LAYERS[0],
    )
    if found.nbytes is None:
        strategy.config(rows)
    return strategy


class _Parts:
    """What stands behind the name."""

    def __init__(self, parts: list[str]) -> None:
        self.rows: int | None = None
        self.sized = False
        self.nbytes: int | None = None
        self.settings: dict[str, Any] = {}
        self.budgets: str | None = None
        self.layers = ""
        for part in parts:
            self._take(part)

    def _take(self, part: str) -> None:
        key, equals, value = (side.strip() for side in part.partition("="))
        packed = re.fullmatch(r"kv(\d+)(?:/(\d+))?", part)
        if part == "none" or part.isdigit():
            if self.sized:
                raise ValueError(f"{part}: rows are given already")
            self.rows, self.sized = None if part == "none" else int(part), True
            if self.rows == 0:
                raise ValueError("0 rows, expected at least one")
        elif packed:
            self._set("kv_bits", int(packed[1]))
            if packed[2]:
                self._set("v_bits", int(packed[2]))
        elif part in KV_FORMATS:
            self._set("kv_format", part)
        elif key == "bytes" or (not equals and part[:1].isdigit()):
            if self.nbytes is not None:
                raise ValueError(f"{part}: bytes are given already")
            self.nbytes = parsed_bytes(value if equals else part)
        elif key == "budgets" and value:
            self.budgets = value
        elif key == "layers":
            if value not in LAYERS:
                raise ValueError(f"layers is {value!r}, expected one of: {', '.join(LAYERS)}")
            self.layers = value
        elif equals:
            self._set(_SHORT.get(key, key), value)
        else:
            raise ValueError(f"{part!r}, expected rows, a size, kvBITS, a format or SETTING=VALUE")

    def _set(self, key: str, value: Any) -> None:
        if key not in _TYPES:
            names = ", ".join((*_SHORT, *_TYPES))
            raise ValueError(f"{key!r} is no setting, expected bytes, budgets or one of: {names}")
        if key in self.settings:
            raise ValueError(f"{key} is given twice")
        given = isinstance(value, int) or key == "kv_format"
        self.settings[key] = value if given else _value(key, value)


def _value(key: str, text: str) -> Any:
    kind = _TYPES[key].partition(" |")[0]
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{key} is {text!r}, expected true or false")
        return text.lower() == "true"
    try:
        return float(text) if kind == "float" else int(text)
    except ValueError:
        raise ValueError(f"{key} is {text!r}, expected a number") from None


def _spelled(name: str, found: _Parts) -> str:
    """One spelling for all texts that ask for the same."""
    if found.nbytes is not None:
        parts = [name, f"bytes={found.nbytes}"]
    else:
        parts = [name, str(found.rows or "none") if found.sized else str(DEFAULT_ROWS)]
    settings = dict(found.settings)
    bits, v_bits = settings.pop("kv_bits", None), settings.pop("v_bits", None)
    if bits is not None:
        parts.append(f"kv{bits}" + (f"/{v_bits}" if v_bits is not None else ""))
    elif v_bits is not None:
        parts.append(f"v_bits={v_bits}")
    parts += [settings.pop("kv_format")] if "kv_format" in settings else []
    long = {full: short for short, full in _SHORT.items()}
    parts += [f"{long.get(key, key)}={str(value).lower()}" for key, value in settings.items()]
    if found.budgets is not None:
        parts.append(f"budgets={found.budgets}")
    if found.layers == "equal":
        parts.append("layers=equal")
    return ":".join(parts)


def _unknown(name: str) -> ValueError:
    return ValueError(f"{name!r} is unknown, expected one of: {', '.join(known_names())}")
