"""The evicting KV cache: when rows come and go, and the members that mlx_lm asks of a cache."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, cast

import mlx.core as mx

from .. import policies
from ..config import H2OConfig
from . import formats, handed_out, tiers
from .attention import DECODE_QUERIES
from .checks import check_rows
from .eviction import Eviction
from .scored import IMPORTANCE, ScoredRows
from .table import Table

__all__ = ["H2OKVCache"]

_UNBOUNDED = 2**31 - 1


class H2OKVCache(ScoredRows):
    """Keys and values of one layer, of which a policy keeps ``config.max_kv_size`` rows per head.

    It takes the place of mlx_lm's KVCache, but is none: a subclass would inherit a batched form
    that does not evict. A step is: evict on the scores so far, append, attend, take in the scores.
    Below the budget rows are in order of position. After evictions slots mean nothing, except that
    the rows of an update are the last ones, in order. Nothing is evaluated here.

    Args:
        config: the settings; None for the defaults.
        name: what error messages call this cache, such as "qwen3 layer 3".

    Attributes:
        config: the settings.
        name: what error messages call these rows.
        policy: what ranks the rows.
        unequal_budgets: whether other layers of the model have other budgets; saved with the rows.

    Raises:
        ValueError: ``config.kv_bits`` is set; that is for :class:`QuantizedH2OKVCache`.
    """

    _quantized: ClassVar[bool] = False
    _batch: ClassVar[Any]
    """The class of several sequences, which names itself here; ``_packed`` that of packed rows."""
    _packed: ClassVar[Any]

    def __init__(self, config: H2OConfig | None = None, *, name: str = "") -> None:
        self._configure(config if config is not None else H2OConfig(), name)
        self._start([0])

    def _configure(self, config: H2OConfig, name: str) -> None:
        if self._quantized != (config.kv_bits is not None):
            expected = (
                "a number, or H2OKVCache" if self._quantized else "None, or QuantizedH2OKVCache"
            )
            raise ValueError(
                f"[{type(self).__name__}] kv_bits is {config.kv_bits}, expected {expected}."
            )
        self.config = config
        self.name = name
        self.policy = policies.build(config)
        self.unequal_budgets = False
        self._budget = config.max_kv_size or _UNBOUNDED
        self._mixed, self._reach, self._group = config.mixed, config.reach, config.group
        self._recent_size = max(config.recent_size or 0, self._reach)
        self._tail_limit = tiers.tail_limit(config) if self._mixed else self._budget
        self._me = weakref.ref(self)

    def _start(self, tokens: list[int], table: Table | None = None) -> None:
        """Hold these rows, at rest."""
        self._table = table
        self._tokens = tokens
        self._unscored = False
        self._surplus = table is not None and max(table.lengths, default=0) > self._budget
        self._handed: tuple[Any, Any] | None = None
        self._identity = 0
        self._free = 0  # tokens that may come one by one before anything else happens
        self._like: tuple[Any, ...] = ()  # shapes and dtypes of the last update
        self._length = 1
        self._width = 0 if table is None else table.width
        self._spans = []
        self._waiting = []
        self.updates = 0

    @property
    def offset(self) -> Any:
        """Tokens seen, which only ``trim`` lowers: RoPE is driven by it, not by ``size()``
        (AtomGradient 2026, sec. 3.3)."""
        return self._tokens[0]

    @property
    def evicted(self) -> int:
        """Rows per head that have gone."""
        if self._table is None:
            return 0
        return sum(self._tokens) - sum(self._table.lengths)

    # Rows that come

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Evict what must go, append the new rows and return all rows for attention.

        Where a token finds the budget full, a group of ``config.group`` rows goes first. Several
        tokens are stored behind the others, so that bottom-right causal masks fit; what is then
        beyond the budget, the surplus, goes at the next update or ``flush()``.

        Args:
            keys: [B, H, L, D] with RoPE applied, L at least 1.
            values: [B, H, L, Dv].

        Returns:
            keys [B, H, N, D] and values [B, H, N, Dv], of which the new rows are the last.
            Where rows are quantised and L is at most 8, both packed: words, scales and biases.

        Raises:
            ValueError: shapes or dtypes that do not match each other or the rows stored.
            RuntimeError: the policy needs scores and the last update got none.
        """
        if self._like == (keys.shape, values.shape, keys.dtype, values.dtype):
            if not self._free:
                self._make_room_for_one(keys.shape[2])
            if self._free:
                return self._append_one(keys, values)
        check_rows(keys, values, self._table)
        self._check_scored()
        self._release()
        table, added = self._table, keys.shape[2]
        if table is None:
            self._table = table = formats.new_table(
                self.config, keys, values, len(self._tokens), self._described()
            )
        self._spans = spans = self._own_spans(added)
        counts = [stop - start for start, stop in spans] if spans else [added] * len(self._tokens)
        table = self._make_room(table, counts)
        before = table.tail.width
        table.append(keys, values, self._tail_limit, spans)
        self._advance(counts)
        self._length = added
        self._width = table.packed_width + max(before + added if spans else 0, table.tail.width)
        self._surplus = added > 1 and max(table.lengths) > self._budget
        self._unscored = self.policy.needs_scores
        self.updates += 1
        self._free = self._room_for_one(table) if added == 1 and not spans else 0
        self._like = keys.shape, values.shape, keys.dtype, values.dtype
        return self._hand_out(table)

    def _make_room_for_one(self, added: int) -> None:
        """Let go what is due before one token, where it is one for every line."""
        table = self._table
        if added == 1 and table is not None and not (self._reach or self._padded):
            self._check_scored()
            self._release()
            table = self._make_room(table, [1] * len(self._tokens))
            self._spans = []
            self._width = table.width
            self._free = self._room_for_one(table)

    def _room_for_one(self, table: Table) -> int:
        """How many tokens may come one by one before anything else happens than an append."""
        rows = table.tail.rows
        if self._reach or (len(rows) > 1 and min(rows) != max(rows)):
            return 0
        limit = self._tail_limit if self._mixed else self._budget
        left = self._budget - max(table.lengths)
        return max(0, min(left, min(limit, table.tail.capacity) - rows[0]))

    @property
    def _padded(self) -> bool:
        """Whether padding is to come."""
        return False

    def _append_one(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """One token where there is room: the step that nearly all steps are."""
        table = cast(Table, self._table)
        if self._unscored:
            self._check_scored()
        self._release()
        self._free -= 1
        self._length = 1
        views = table.append_one(keys, values)
        self._advance_one()
        self._width += 1
        self._unscored = self.policy.needs_scores
        self.updates += 1
        if len(table.segments) > 1 or table.changed:
            return self._hand_out(table)
        tail, arrays = table.segments[0], self._hands_arrays
        return self._known(
            table, tail.keys.given(views[0], arrays), tail.values.given(views[1], arrays)
        )

    def _own_spans(self, added: int) -> list[tuple[int, int]]:
        """Which of the new tokens are each line's own; empty: all."""
        return []

    def _advance_one(self) -> None:
        self._tokens[0] += 1

    def _advance(self, counts: Sequence[int]) -> None:
        self._tokens = [seen + count for seen, count in zip(self._tokens, counts, strict=True)]

    def _make_room(self, table: Table, counts: Sequence[int]) -> Table:
        """The table with room for so many rows of each line; what is due goes."""
        added = max(counts)
        if self._surplus:
            table = self._let_surplus_go(table)
        if self._reach:
            self._settle_waiting(self._tokens[0] + added - self._reach)
        keeps = [self._kept(rows, count) for rows, count in zip(table.lengths, counts, strict=True)]
        due = [line for line, keep in enumerate(keeps) if keep < table.lengths[line]]
        if due:
            table = self._evict(table, due, keeps[due[0]], counts)
        if self._mixed:
            full = [n for n, rows in enumerate(table.tail.rows) if rows >= self._tail_limit]
            if full:
                table = self._evict(table, full, _UNBOUNDED, counts)
        elif added == 1:
            table.fit(self._budget)
        return table

    def _kept(self, rows: int, added: int) -> int:
        """Of a line's rows, how many stay when so many come."""
        need = rows + added - self._budget
        if need <= 0 or not 0 < added <= max(1, self._reach):
            return rows
        # Of those that no range protects, a whole group.
        evictable = rows - self.config.sink_size - max(0, self._recent_size - added)
        return rows - max(need, min(self._group, evictable))

    def _evict(self, table: Table, due: Sequence[int], keep: int, counts: Sequence[int]) -> Table:
        """Let all but the best ``keep`` rows of the lines in ``due`` go, before rows come."""
        config, recent = self.config, self._recent_size
        eviction = Eviction(
            table=table,
            policy=self.policy,
            offsets=self._tokens,
            due=due,
            keep=min(keep, table.width),
            sink_size=config.sink_size,
            recent_start=[n + new - recent for n, new in zip(self._tokens, counts, strict=True)],
            tail=min(table.tail.rows[0], max(0, self._reach - max(counts))),
            shared_heads=config.shared_heads,
        )
        if self._mixed:
            self._table = table = tiers.packed(eviction, config)
        else:
            eviction.run()
        return table

    def _let_surplus_go(self, table: Table) -> Table:
        self._surplus = False
        due = [line for line, rows in enumerate(table.lengths) if rows > self._budget]
        if not due:
            return table
        self._settle_waiting(self._tokens[0] - self._reach)
        return self._evict(table, due, self._budget, [0] * len(self._tokens))

    def flush(self) -> None:
        """Let the surplus of a chunk go, and give up room that is no longer needed.

        Raises RuntimeError where the chunk still waits for its scores.
        """
        table = self._table
        if table is None or not self._surplus:
            return
        self._check_scored()
        self._release()
        self._free = 0
        table = self._let_surplus_go(table)
        if not self._mixed:
            table.fit(self._budget)
        self._width = table.width

    def _hand_out(self, table: Table) -> tuple[Any, Any]:
        tail = table.segments[-1].keys
        in_parts = len(table.segments) > 1
        if table.changed and in_parts:
            tail.parts = (mx.depends(tail.parts[0], table.loose(scored=False)),)
        keys, values = self._as_handed(table)
        if table.changed and not in_parts:
            # Whoever evaluates the keys evaluates these too: otherwise the graph of every step
            # would hang on them until the next eviction.
            keys = _tied(keys, table.loose(self.policy.needs_scores))
        table.changed = False
        return self._known(table, keys, values)

    def _known(self, table: Table, keys: Any, values: Any) -> tuple[Any, Any]:
        """Keys and values that are known from now on as handed out by this cache."""
        # Arrays that are made of packed rows live no longer than attention needs them.
        plain = isinstance(keys, tuple) or table.segments[-1].keys.bits is None
        held = len(table.segments) == 1 and plain
        self._handed = (keys, values) if held else None
        self._identity = handed_out.register(keys, self._me, held=held)
        return keys, values

    def _as_handed(self, table: Table) -> tuple[Any, ...]:
        """Keys and values as attention of the last update takes them."""
        width = self._width
        if len(table.segments) > 1:
            return table.dense("keys", width), table.dense("values", width)
        one, arrays = table.segments[0], self._hands_arrays
        return (
            one.keys.given(one.keys.view(width), arrays),
            one.values.given(one.values.view(width), arrays),
        )

    @property
    def _hands_arrays(self) -> bool:
        """Whether packed rows are handed out as arrays."""
        handed = self.config.kv_handed
        most = 1 if handed == "latents" else DECODE_QUERIES
        return handed == "arrays" or self._length > most

    def _release(self) -> None:
        """Hold no longer what was handed out, so that MLX may write in place."""
        self._handed = None
        handed_out.forget(self._identity)

    def __del__(self) -> None:
        handed_out.forget(getattr(self, "_identity", 0))

    def keys_and_values(self) -> tuple[Any, Any]:
        """The rows as the last update returned them.

        For layers that share the rows of another. Raises ValueError while there are none.
        """
        if self._table is None:
            raise ValueError("[H2OKVCache.keys_and_values] there are no rows yet.")
        return self._handed if self._handed is not None else self._hand_out(self._table)

    # What there is

    def size(self) -> int:
        """Rows stored per head, the surplus of a chunk included."""
        return 0 if self._table is None else max(self._table.lengths, default=0)

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self._table is None

    @property
    def nbytes(self) -> int:
        """Bytes of every array stored: keys, values, scores, positions, and room for more."""
        return 0 if self._table is None else sum(array.nbytes for array in self._table.arrays)

    @property
    def keys(self) -> Any:
        """The stored keys [B, H, N, D], or None. May be set to an array of the same shape.

        Where rows are quantised: their words, scales and biases.
        """
        return None if self._table is None else formats.stored(self._table)[0]

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._set("keys", keys)

    @property
    def values(self) -> Any:
        """The stored values [B, H, N, Dv], or None. May be set, as the keys."""
        return None if self._table is None else formats.stored(self._table)[1]

    @values.setter
    def values(self, values: Any) -> None:
        self._set("values", values)

    def _set(self, name: str, rows: Any) -> None:
        if self._table is None:
            raise ValueError(f"[H2OKVCache.{name}] an array was set, but no rows are stored.")
        self._release()
        self._free = 0
        formats.set_rows(self._table, name, rows)

    @property
    def scores(self) -> mx.array | None:
        """float32 [B, H, N]: what the policy accumulated for each row, NaN where nothing yet."""
        table = self._table
        if table is None:
            return None
        if IMPORTANCE in table.beside:
            return table.beside[IMPORTANCE][:, :, : table.width]
        return mx.full((*table.shape, table.width), mx.nan, mx.float32)

    @property
    def positions(self) -> mx.array | None:
        """int32 [B, H, N]: the place of each stored row in the sequence, -1 where there is none."""
        return None if self._table is None else self._table.positions(self._tokens)

    @property
    def needs_routing(self) -> bool:
        """Whether attention must be ours: it has to return scores, or to read packed rows."""
        return self.policy.needs_scores or self.config.kv_bits is not None

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask for the next ``length`` tokens over the rows that their update will return.

        None for one token; for more "causal" (bottom-right aligned) or, with ``return_array``,
        bool [length, rows + length].

        Raises:
            ValueError: ``window_size`` is given; slots do not tell how old a row is. An array is
                asked for where other layers have other budgets: it would not fit them.
        """
        if window_size is not None:
            raise ValueError(
                f"[H2OKVCache.make_mask] window_size is {window_size}, expected None: "
                f"{self._described()} evicts rows, and cannot serve a sliding-window layer."
            )
        if length == 1:
            return None
        if not return_array:
            return "causal"
        if self.unequal_budgets:
            raise ValueError(
                f"[H2OKVCache.make_mask] {self._described()} is asked for an array mask, which the "
                "model uses for all layers, but their budgets are unequal: expected one budget."
            )
        before = self._kept(min(self.size(), self._budget), length)
        return mx.arange(before, before + length)[:, None] >= mx.arange(before + length)[None]

    # Rows that are taken back

    def is_trimmable(self) -> bool:
        """Whether ``trim`` is exact: until the first eviction, done or due, and not after it; with
        speculation always, for the newest tokens."""
        return self._reach > 0 or not (self.evicted or self._surplus)

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens, or all where there are fewer; returns how many.

        With speculation up to ``speculative + 1`` tokens leave no trace. Else the rows are exact;
        the scores that the taken back queries gave to the others remain.

        Raises:
            ValueError: rows have been evicted, so that the earlier rows cannot be restored.
        """
        n = max(0, min(min(self._tokens), n)) if len(self._tokens) == 1 else max(0, n)
        reach = min(self._reach, self._tokens[0])
        if (self.evicted or self._surplus) and (n > reach or not self._reach):
            wanted = f"at most {reach}" if self._reach else "none: see is_trimmable()"
            raise ValueError(
                f"[{type(self).__name__}.trim] {self._described()} has evicted rows and was asked "
                f"to take back {n} tokens, expected {wanted}."
            )
        table = self._table
        if n == 0 or table is None:
            return 0
        self._release()
        self._free = 0
        gone = [min(n, rows) for rows in table.lengths]
        left = [rows - count for rows, count in zip(table.tail.rows, gone, strict=True)]
        self._cut_waiting(0, self._tokens[0] - n)
        if min(left) < 0:
            self._table = table = tiers.truncated(table, self._tokens, gone, self.config)
        else:
            table.truncate(left)
        self._advance([-count for count in gone])
        self._width = table.width
        self._surplus = self._surplus and self.size() > self._budget
        self._unscored = False
        return max(gone)

    # State, copies, other forms

    @property
    def state(self) -> tuple[Any, ...]:
        """keys, values, scores, positions, offset, evicted, unscored, name, settings.

        The first four are None in an empty cache. Leaves are arrays, ints, bools and strings, so
        that mlx_lm can save them; the settings are JSON. Later updates do not change what was
        read. With speculation two more: the scores of the newest queries, which wait, and the
        positions and numbers of these (JSON).
        """
        table = self._table
        rows = (
            (None,) * 4 if table is None else (*formats.stored(table), self.scores, self.positions)
        )
        given = asdict(self.config)
        if self.unequal_budgets:  # else it is not there, and files are what they always were
            given["unequal_budgets"] = True
        settings = json.dumps(given)
        found = (*rows, self.offset, self.evicted, self._unscored, self.name, settings)
        return (*found, *self._waiting_state()) if self._reach else found

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        # Also serves objects that were made without __init__.
        if len(state) not in (9, 11, 12):
            raise ValueError(
                f"[H2OKVCache.state] found {len(state)} parts, expected 9: keys, values, scores, "
                "positions, offset, evicted, unscored, name, settings; or 11 with speculation."
            )
        keys, values, importance, positions, offset, _, unscored, name, settings, *more = state
        given = json.loads(settings)
        unequal = bool(given.pop("unequal_budgets", False))
        self._configure(H2OConfig(**given), name)
        self.unequal_budgets = unequal
        table = None
        if importance is not None:
            table = formats.restored_table(self.config, keys, values)
            table.place(positions)
            if self.policy.needs_scores:
                table.attach(IMPORTANCE, importance, float("nan"))
        self._start([int(offset)], table)
        self._unscored = bool(unscored)
        if more:  # three in earlier versions, which wrote where queries end
            self._restore_waiting(more[-2], more[-1], ends=len(more) == 3)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> H2OKVCache:
        """A cache with the given ``state``, settings included."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> H2OKVCache:
        self.flush()
        copy = type(self).__new__(type(self))
        copy._configure(self.config, self.name)
        copy.unequal_budgets = self.unequal_budgets
        self._copy_to(copy)
        memo[id(self)] = copy
        return copy

    def _copy_to(self, copy: H2OKVCache) -> None:
        copy._start(list(self._tokens), None if self._table is None else self._table.copy())
        copy._unscored, copy._length = self._unscored, self._length
        copy._waiting, copy._spans = list(self._waiting), list(self._spans)

    def take_settings(self, config: H2OConfig, *, unequal_budgets: bool) -> None:
        """Other settings for a cache that has seen no token. Raises ValueError otherwise."""
        if not self.empty():
            raise ValueError(f"[H2OKVCache.take_settings] {self._described()} is not empty.")
        self._configure(config, self.name)
        self.unequal_budgets = unequal_budgets

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """One cache of several sequences, for batches: see ``BatchH2OKVCache.merge``."""
        return cls._batch.merge(caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """The same rows, scores and positions in a cache that quantises: QuantizedH2OKVCache.

        Later rows are quantised as they come. This cache stays as it is.

        Raises:
            ValueError: ``bits`` or ``group_size`` that H2OConfig does not know as ``kv_bits`` and
                ``kv_group_size``; rows of a size that cannot be quantised.
            RuntimeError: a chunk still waits for its scores.
        """
        config = replace(self.config, kv_bits=bits, kv_group_size=group_size)
        self.flush()
        cache = self._packed(config, name=self.name)
        table = self._table and formats.quantized(config, self._table, self._described())
        cache._start(list(self._tokens), table)
        cache._unscored, cache._waiting = self._unscored, list(self._waiting)
        cache.unequal_budgets = self.unequal_budgets
        return cache

    def _check_scored(self) -> None:
        """Eviction is never silently off."""
        if self._unscored:
            raise RuntimeError(
                f"[H2OKVCache] {self._described()} got no scores for its last update, and the "
                f"policy {self.config.policy!r} needs them: call the model within "
                "mlx_h2o.routing(model), or choose a policy that needs none."
            )

    def _described(self) -> str:
        return f"the cache of {self.name}" if self.name else "this cache"


def _tied(rows: Any, others: list[mx.array]) -> Any:
    """``rows``, whose evaluation evaluates ``others`` too."""
    if isinstance(rows, tuple):
        return (mx.depends(rows[0], others), *rows[1:])
    return mx.depends(rows, others)
