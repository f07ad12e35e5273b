"""Checks of the operations on a cache's rows, and the validated requests that back ends receive.

Requests are named tuples, which are made faster than frozen dataclasses: some are made once per
layer and token.
"""

from typing import Literal, NamedTuple

import mlx.core as mx

from mlx_h2o import arguments
from mlx_h2o.arguments import StreamLike
from mlx_h2o.ema import MAX_QUERIES
from mlx_h2o.validate import FLOATS, AttentionRequest, attention_request, dtype_name

RankName = Literal["importance", "age", "key_diversity"]

_INT32 = 2**31 - 1
_LAST_POSITION = 2**30 - 1
_RANK_NAMES = ("importance", "age", "key_diversity")


class AccumulateRequest(NamedTuple):
    """One validated call of ``accumulate_scores``; ``masked`` is False if no score is masked."""

    importance: mx.array
    scores: mx.array
    decay: float
    masked: bool = True
    stream: StreamLike = None


class AttentionAccumulateRequest(NamedTuple):
    """One validated call of ``attention_and_accumulate``."""

    attention: AttentionRequest
    importance: mx.array
    decay: float


class PrefillRequest(NamedTuple):
    """One validated call of ``prefill_scores``.

    ``attention`` has the queries that count, its values are of no account; ``importance`` is None
    where no row has been scored, and for "mass".
    """

    attention: AttentionRequest
    kind: Literal["ema", "mass"]
    importance: mx.array | None
    decay: float

    @property
    def stream(self) -> StreamLike:
        return self.attention.stream


class KeyDiversityRequest(NamedTuple):
    """One validated call of ``key_diversity``."""

    keys: mx.array
    stream: StreamLike = None


class ReplaceRequest(NamedTuple):
    """One validated call of ``replace_worst``: ``ranks`` are an array or a rank's name."""

    keys: mx.array
    values: mx.array
    importance: mx.array
    positions: mx.array
    new_keys: mx.array
    new_values: mx.array
    position: int
    sink_size: int
    recent_start: int | None
    ranks: mx.array | RankName
    stream: StreamLike = None


def _found(array: mx.array) -> str:
    return f"{dtype_name(array.dtype)} {array.shape}"


def _decay(op: str, decay: object) -> float:
    found = arguments.number(op, "decay", decay)
    if not 0 <= found < 1:
        raise ValueError(f"[{op}] decay is {found}, expected at least 0 and below 1.")
    return found


def _check_queries(op: str, found: int) -> None:
    if found > MAX_QUERIES:
        raise ValueError(f"[{op}] found {found} queries, expected at most {MAX_QUERIES}.")


def accumulate_request(
    importance: mx.array,
    scores: mx.array,
    *,
    decay: float,
    masked: bool = True,
    stream: StreamLike = None,
) -> AccumulateRequest:
    """Check the arguments of ``accumulate_scores``."""
    op = "accumulate_scores"
    importance = arguments.array(op, "importance", importance)
    scores = arguments.array(op, "scores", scores)
    found, rows = scores.shape, importance.shape
    if len(found) != 4 or 0 in found or scores.dtype != mx.float32:
        raise ValueError(
            f"[{op}] scores are {_found(scores)}, expected float32 [B, Hq, Lq, N], "
            "every size at least 1."
        )
    _check_importance(op, importance, found[0], found[3])
    if found[1] % rows[1]:
        raise ValueError(
            f"[{op}] scores have {found[1]} heads, "
            f"expected a multiple of the {rows[1]} heads of importance."
        )
    _check_queries(op, found[2])
    place = arguments.stream(op, stream)
    return AccumulateRequest(importance, scores, _decay(op, decay), bool(masked), place)


def _check_importance(op: str, importance: mx.array, batch: int, rows: int) -> None:
    shape = importance.shape
    fits = len(shape) == 3 and shape[0] == batch and shape[2] == rows and shape[1] > 0
    if not fits or importance.dtype != mx.float32:
        raise ValueError(
            f"[{op}] importance is {_found(importance)}, "
            f"expected float32 [B, H, N] with B = {batch}, N = {rows}."
        )


def attention_accumulate_request(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    importance: mx.array,
    *,
    scale: float,
    decay: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    stream: StreamLike = None,
) -> AttentionAccumulateRequest:
    """Check the arguments of ``attention_and_accumulate``."""
    op = "attention_and_accumulate"
    attention = attention_request(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks, stream=stream, op=op
    )
    importance = arguments.array(op, "importance", importance)
    batch, heads, rows = keys.shape[:3]
    _check_importance(op, importance, batch, rows)
    if importance.shape[1] != heads:
        raise ValueError(
            f"[{op}] importance has {importance.shape[1]} heads, expected {heads} as the keys."
        )
    _check_queries(op, queries.shape[2])
    return AttentionAccumulateRequest(attention, importance, _decay(op, decay))


def key_diversity_request(keys: mx.array, *, stream: StreamLike = None) -> KeyDiversityRequest:
    """Check the arguments of ``key_diversity``."""
    op = "key_diversity"
    keys = arguments.array(op, "keys", keys)
    if keys.ndim != 4 or 0 in keys.shape or keys.dtype not in FLOATS:
        raise ValueError(
            f"[{op}] keys are {_found(keys)}, expected float32, float16 or bfloat16 "
            "[B, H, N, D], every size at least 1."
        )
    return KeyDiversityRequest(keys, arguments.stream(op, stream))


def replace_request(
    keys: mx.array,
    values: mx.array,
    importance: mx.array,
    positions: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    *,
    position: int,
    sink_size: int = 0,
    recent_start: int | None = None,
    ranks: mx.array | RankName | None = None,
    stream: StreamLike = None,
) -> ReplaceRequest:
    """Check the arguments of ``replace_worst``."""
    op = "replace_worst"
    stored = {"keys": keys, "values": values}
    for name, array in stored.items():
        array = arguments.array(op, name, array)
        if array.ndim != 4 or 0 in array.shape or array.dtype not in FLOATS:
            raise ValueError(
                f"[{op}] {name} are {_found(array)}, expected float32, float16 or bfloat16 "
                "with 4 dimensions, every size at least 1."
            )
    rows = keys.shape[:3]
    if values.shape[:3] != rows:
        raise ValueError(
            f"[{op}] keys and values have shapes {keys.shape} and {values.shape}, "
            "expected the same [B, H, N]."
        )
    by = "importance" if ranks is None else ranks
    per_row = [("importance", importance, mx.float32), ("positions", positions, mx.int32)]
    if not isinstance(by, str):
        per_row.append(("ranks", by, mx.float32))
    elif by not in _RANK_NAMES:
        raise ValueError(
            f"[{op}] ranks are {by!r}, expected an array, None or one of {_RANK_NAMES}."
        )
    for name, array, dtype in per_row:
        array = arguments.array(op, name, array)
        if array.shape != rows or array.dtype != dtype:
            raise ValueError(
                f"[{op}] {name} are {_found(array)}, "
                f"expected {dtype_name(dtype)} [B, H, N] = {rows}."
            )
    for name, new in (("keys", new_keys), ("values", new_values)):
        new = arguments.array(op, f"new_{name}", new)
        expected = (*rows[:2], 1, stored[name].shape[3])
        if new.shape != expected or new.dtype != stored[name].dtype:
            raise ValueError(
                f"[{op}] new {name} are {_found(new)}, expected "
                f"{dtype_name(stored[name].dtype)} {expected} as the {name}."
            )
    position, sink_size, recent_start = _zones(op, position, sink_size, recent_start)
    place = arguments.stream(op, stream)
    return ReplaceRequest(
        keys, values, importance, positions, new_keys, new_values,
        position, sink_size, recent_start, by, place,
    )  # fmt: skip


def _zones(
    op: str, position: object, sink_size: object, recent_start: object
) -> tuple[int, int, int | None]:
    place = arguments.integer(op, "position", position)
    if not 0 <= place <= _LAST_POSITION:
        raise ValueError(f"[{op}] position is {place}, expected 0 to 2**30 - 1.")
    sinks = arguments.integer(op, "sink_size", sink_size)
    if sinks < 0:
        raise ValueError(f"[{op}] sink_size is {sinks}, expected 0 or more.")
    if recent_start is None:
        return place, min(sinks, _INT32), None
    start = arguments.integer(op, "recent_start", recent_start)
    return place, min(sinks, _INT32), max(-_INT32, min(start, _INT32))
