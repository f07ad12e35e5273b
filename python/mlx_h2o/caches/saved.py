"""What a cache is in files: its rows, and its settings as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..config import H2OConfig
from ..operations.arguments import dtype_name
from . import formats, scores
from .frame import kept_size
from .table import BIAS, IMPORTANCE, Table

_GONE = {"turbo_guard": 0, "shared_heads": False}
"""Settings of earlier versions, which files name, and the value at which they changed nothing."""

_USUAL = {"prefix_size": 0, "context_size": None, "fold": True, "rows_at": ()}
"""Settings that files name only where they are others: files are what they always were."""


def settings_text(cache: Any) -> str:
    """The settings of a cache, as JSON."""
    given, table = cache.config.named(), cache._table
    del given["preallocate"]  # of this process, and not of the rows
    for name, value in (*_USUAL.items(), ("kv_frame", _framed_by_default(given))):
        if given[name] == value:
            del given[name]
    if cache.unequal_budgets:
        given["unequal_budgets"] = True
    if table is not None:
        (_, _, size, dtype) = table.layouts[1]
        if cache.config.kv_format is not None:
            given["dtype"] = dtype_name(dtype)
        if cache.config.framed and kept_size(size) != size:
            given["value_size"] = size
    return json.dumps(given)


def read_settings(settings: str) -> tuple[H2OConfig, bool, tuple[mx.Dtype, int]]:
    """The settings, whether budgets are unequal, and the dtype of rows and elements of a value,
    where these cannot be seen."""
    given = json.loads(settings)
    unequal, size = bool(given.pop("unequal_budgets", False)), int(given.pop("value_size", 0))
    for gone, usual in _GONE.items():
        if (value := given.pop(gone, usual)) != usual:
            raise ValueError(
                f"[H2OKVCache] {gone} is {value!r}, expected {usual!r}: this setting of "
                "earlier versions is gone."
            )
    given.setdefault("kv_frame", _framed_by_default(given))
    dtype = getattr(mx, given.pop("dtype", "float32"))
    if "diversity" not in given and given["policy"] == "h2o":
        given["policy"] = "h2o-ema"  # as it was called when there was none
    return H2OConfig.of(**given), unequal, (dtype, size)


def _framed_by_default(settings: dict[str, Any]) -> bool:
    """What settings mean that do not name ``kv_frame``: those of packed rows are older."""
    return settings.get("kv_bits") is None or settings.get("kv_handed") == "latents"


def scores_of(table: Table) -> mx.array:
    """float32 [B, H, N], NaN where nothing has been accumulated."""
    if IMPORTANCE in table.beside:
        return table.beside[IMPORTANCE][:, :, : table.width]
    return mx.full((*table.shape, table.width), mx.nan, mx.float32)


def rows_of(table: Table | None) -> tuple[Any, ...]:
    """Keys, values, scores and positions, without those that are shared. Where rows have been
    folded, scores are a pair: those, and the biases of the rows."""
    if table is None:
        return None, None, None, None
    found: Any = scores_of(table)
    if BIAS in table.beside:
        found = found, table.beside[BIAS][:, :, : table.width]
    keys, values = (formats.state_of(table, side) for side in ("keys", "values"))
    return keys, values, found, table.positions


def shared_of(table: Table | None) -> tuple[Any, ...]:
    """The keys and values that are shared, if any are."""
    return () if table is None or table.prefix is None else (table.prefix.state,)


def waiting_of(cache: Any) -> tuple[mx.array | None, str]:
    """What waits, [B, Hq, queries, N], and the positions and numbers of these queries."""
    table = cache._table
    if table is None:
        return None, "[]"
    return scores.waiting(cache.policy, table), json.dumps(table.waiting)


def table_of(
    config: H2OConfig,
    scored: bool,
    tokens: Sequence[int],
    state: Sequence[Any],
    rows: Any,
    shared: Any,
    dtype: mx.Dtype,
    value_size: int,
) -> Table | None:
    """The rows of a state, so many ``rows`` of each sequence in each segment, and those that are
    ``shared``."""
    keys, values, importance, positions = state[:4]
    if importance is None:
        return None
    importance, bias = importance if isinstance(importance, tuple | list) else (importance, None)
    table = formats.restored_table(config, tokens, keys, values, rows, dtype, value_size)
    table.place(positions)
    if scored:
        table.attach(IMPORTANCE, importance)
    if bias is not None:
        table.attach(BIAS, bias)
    if shared is not None:
        keys, values = shared
        frame = table.frame = table.frame and table.frame.as_shared()
        keys = keys if frame is None else (*keys, frame.centre)
        table.prefix = formats.restored_table(config, tokens, keys, values, None, dtype).tail
    return table
