"""How a cache is saved: its rows, and its settings as JSON."""

import copy
import json
from collections.abc import Sequence
from typing import Any, Self, cast

import mlx.core as mx

from ..config import H2OConfig
from ..errors import check
from ..operations.arguments import dtype_name
from . import formats
from .column import Segment
from .frame import Frame
from .step import Padding
from .table import BIAS, IMPORTANCE, POSITIONS, Table

_GONE = {"turbo_guard": 0, "shared_heads": False}
"""Removed settings that older files may name, and the value at which they had no effect."""

_USUAL = {"prefix_size": 0, "context_size": None, "fold": True, "rows_at": ()}
"""Newer settings that are saved only if they differ, so that other files stay as they were."""


class Restorable:
    """A cache that its ``state`` describes as a whole, and that is copied as a whole."""

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Self:
        """A cache with the given ``state``, including its settings."""
        cache = cls.__new__(cls)
        cast(Any, cache).state = state
        return cache

    def __copy__(self) -> Self:
        return copy.deepcopy(self)  # rows change in place, so copies cannot share them

    def __reduce__(self) -> Any:
        raise ValueError(
            f"[{type(self).__name__}] a cache cannot be pickled, expected "
            "mlx_h2o.save_prompt_cache to keep it."
        )


def settings_text(cache: Any) -> str:
    """The settings of a cache, as JSON."""
    given, table = cache.config.named(), cache._table
    del given["preallocate"]  # concerns this process, not the rows
    for name, value in (*_USUAL.items(), ("kv_frame", _framed_by_default(given))):
        if given[name] == value:
            del given[name]
    if cache.unequal_budgets:
        given["unequal_budgets"] = True
    if table.segments and cache.config.kv_format is not None:
        given["dtype"] = dtype_name(table.layouts[1][3])
    return json.dumps(given)


def read_settings(settings: str) -> tuple[H2OConfig, bool, tuple[mx.Dtype, int]]:
    """The settings, whether budgets are unequal, and the dtype of rows and the size of a value, for
    formats that do not show them."""
    given = json.loads(settings)
    unequal, size = bool(given.pop("unequal_budgets", False)), int(given.pop("value_size", 0))
    for gone, usual in _GONE.items():
        value = given.pop(gone, usual)
        wanted = f"{usual!r}: this setting of earlier versions is gone"
        check(value == usual, gone, value, wanted, operation="H2OKVCache")
    given.setdefault("kv_frame", _framed_by_default(given))
    if given.get("light_bits") is None:  # null or nothing in older files
        given["dense_size"] = given.get("dense_size") or 0
    dtype = getattr(mx, given.pop("dtype", "float32"))
    if "diversity" not in given and given["policy"] == "h2o":
        given["policy"] = "h2o-ema"  # its name before there was ``diversity``
    return H2OConfig.of(**given), unequal, (dtype, size)


def _framed_by_default(settings: dict[str, Any]) -> bool:
    """``kv_frame`` if settings do not name it: False for packed rows, which are older then."""
    return settings.get("kv_bits") is None or settings.get("kv_handed") == "latents"


def stored(table: Table, side: str) -> Any:
    """The "keys" or "values" in use, in stored form: an array, or words, scales and biases; in
    mixed precision those of each segment."""
    parts = [part for one in table.segments for part in one.stored(side)]
    return parts[0] if len(parts) == 1 else tuple(parts)


def set_rows(table: Table, side: str, rows: Any) -> None:
    """Replace the "keys" or "values" by ``rows``, in the form that ``stored`` returns.

    Raises ValueError for rows of other shapes or dtypes.
    """
    parts, before = _parts(rows), _parts(stored(table, side))
    found, expected = ([(part.shape, part.dtype) for part in some] for some in (parts, before))
    if found != expected:
        raise ValueError(f"[H2OKVCache.{side}] found {found}, expected {expected} as stored.")
    left = iter(parts)
    for one in table.segments:
        both = [*one.sides(one.parts)]
        both[side == "values"] = tuple(next(left)[...] for _ in both[side == "values"])
        one.parts, one.read, one.room = [*both[0], *both[1]], None, 0


def _parts(rows: Any) -> list[mx.array]:
    return list(rows) if isinstance(rows, tuple | list) else [rows]


def rows_of(table: Table) -> tuple[Any, ...]:
    """Keys and values, each followed by the centre of their frame, scores and positions, without
    shared rows. If rows have been folded, scores are a pair: scores and biases."""
    if not table.segments:
        return None, None, None, None
    found: Any = table.filled(IMPORTANCE)
    if BIAS in table.beside:
        found = found, table.filled(BIAS)
    keys, values = stored(table, "keys"), stored(table, "values")
    if table.frame is not None:
        of_keys, of_values = table.frame.centres
        keys, values = (*keys, of_keys), (*values, of_values)
    return keys, values, found, table.positions


def places_of(more: Sequence[Any]) -> list[tuple[int, int]]:
    """First position and number of queries of each run of pending scores. Earlier versions, with
    one part more, saved where a run ends instead of the number."""
    ends, runs = len(more) == 3, json.loads(more[-1])
    return [(start, count - start if ends else count) for start, count in runs]


def sequences_text(padding: Sequence[Padding], table: Table) -> str:
    """The sequences of a batch, as JSON."""
    found = {
        "tokens": table.tokens,
        "rows": [one.rows for one in table.segments],
        "before": [left for left, _ in padding],
        "remaining": [own for _, own in padding],
    }
    return json.dumps(found)


def table_of(
    config: H2OConfig,
    tokens: list[int],
    state: Sequence[Any],
    rows: Any,
    shared: Any,
    dtype: mx.Dtype,
    value_size: int,
) -> Table:
    """The table of a state: ``rows`` of each sequence in each segment (None: all slots), and the
    ``shared`` keys and values, if any."""
    keys, values, importance, positions = state[:4]
    if importance is None:
        return Table([], tokens)
    importance, bias = importance if isinstance(importance, tuple | list) else (importance, None)
    sides = [_parts(keys), _parts(values)]
    both = len(sides[0]) == len(sides[1])  # values had no centre in earlier versions
    centres = [side.pop() for side in sides[: 1 + both]] if config.framed else []
    segments = _segments(config, sides, rows, dtype)
    table = Table(segments, tokens)
    if centres:
        if shared is not None:  # earlier versions saved one for all
            centres = [mx.broadcast_to(one, (len(tokens), *one.shape[1:])) for one in centres]
        if not both:
            size = value_size or segments[0].row[1].shape[3]
            centres.append(mx.zeros((*centres[0].shape[:3], size), centres[0].dtype))
        table.frame = Frame(centres)
    table.attach(POSITIONS, positions)
    if config.policy.needs_scores:
        table.attach(IMPORTANCE, mx.where(positions < 0, mx.nan, importance))  # unused slots
    if bias is not None:
        table.attach(BIAS, bias)
    if shared is not None:
        (table.prefix,) = _segments(config, [_parts(rows) for rows in shared], None, dtype)
    return table


def _segments(
    config: H2OConfig, sides: Sequence[list[mx.array]], rows: Any, dtype: mx.Dtype
) -> list[Segment]:
    """Segments made of the parts of keys and values, with ``rows`` of each sequence in each segment
    (None: all, of one sequence). ``dtype`` of arriving rows is for formats that do not show it."""
    found, size = [], 0
    if len(sides[0]) >= 3:
        words, scales = sides[0][:2]
        size = words.shape[3] * 32 // (config.kv_bits or 8) // scales.shape[3]
    count = -(-len(sides[0]) // 3)  # of which a shared prefix has one
    for place, pair in enumerate(formats.columns(config, size, dtype)[:count]):
        # New array objects, because segments are written in place later.
        both = [[part[...] for part in side[3 * place : 3 * place + 3]] for side in sides]
        slots = both[0][0].shape[2]
        found.append(Segment(*pair, both, [slots] if rows is None else rows[place]))
    return found
