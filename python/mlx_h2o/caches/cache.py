"""The evicting KV cache: when rows come and go, and the members that mlx_lm asks of a cache."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import mlx.core as mx

from ..config import Affine, H2OConfig
from ..operations.arguments import dtype_name
from ..operations.backends import resolve
from . import formats, tiers
from .attention import DECODE_QUERIES, as_they_came, dense
from .checks import check_rows
from .column import Parts
from .eviction import Eviction
from .frame import kept_size
from .handed_out import EachLayersMask, HandedOut
from .masks import mask_of
from .prefix import Prefix, unshareable
from .scored import ScoredRows
from .stored import BIAS, IMPORTANCE
from .table import Table
from .torn import Torn, changes

_UNBOUNDED = 2**31 - 1

_GONE = {"turbo_guard": 0}
"""Settings of earlier versions, which files name, and the value at which they changed nothing."""

PROMPT_CHUNK = 2048
"""Tokens of a prompt that mlx_lm reads at a time."""


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
        policy: what ranks the rows.
        unequal_budgets: whether other layers of the model have other settings, so that one mask
            does not fit all; saved with the rows.

    Raises:
        ValueError: ``config.kv_bits`` is set; that is for :class:`QuantizedH2OKVCache`.
    """

    _came_in: mx.Dtype = mx.float32
    """The dtype of the rows of a state that has only codes of them."""
    _value_size = 0
    """Elements of its values, where they are kept in more."""
    _quantized: ClassVar[bool | None] = False
    """Whether rows must be quantised; None: either way."""
    _in_batch: ClassVar[bool] = False
    """Whether sequences may differ, so that every step has a mask."""
    _batch: ClassVar[Any]
    _packed: ClassVar[Any]
    """The classes of several sequences and of packed rows, which name themselves here."""

    def __init__(self, config: H2OConfig | None = None, *, name: str = "") -> None:
        self._configure(config if config is not None else H2OConfig(), name)
        self._start([0])

    def _configure(self, config: H2OConfig, name: str) -> None:
        if self._quantized not in (None, config.kv_bits is not None):
            expected = (
                "a number, or H2OKVCache" if self._quantized else "None, or QuantizedH2OKVCache"
            )
            raise ValueError(
                f"[{type(self).__name__}] kv_bits is {config.kv_bits}, expected {expected}."
            )
        self.config = config
        self.name = name
        self.policy = config.policy
        self.unequal_budgets = False
        self._mixed, self._reach, self._group = config.mixed, config.reach, config.group
        self._stand_on(None)

    def _stand_on(self, prefix: Prefix | None) -> None:
        """Share these rows, which are those of the first tokens; None: share none."""
        self._prefix = prefix
        config, shared = self.config, self.prefix_rows
        self._plan(0)
        self._protected = max(0, config.protected - shared)
        # Rows of mixed precision are not in order.
        self._skip = 0 if self._mixed else max(0, config.prefix_size - shared)
        # Of an update; only ours knows of scores, biases and shared rows.
        self._needs_attention = self.policy.needs_attention or prefix is not None

    def _plan(self, tokens: int) -> None:
        """Have the budget of so many tokens, those of a shared prefix apart."""
        config = self.config
        most = config.max_kv_size or _UNBOUNDED
        later = ((end, rows) for end, rows in config.rows_at if end >= tokens)
        self._planned, rows = next(later, (_UNBOUNDED, most))
        self._budget = rows - self.prefix_rows
        self._tail_limit = tiers.tail_limit(config) if self._mixed else self._budget
        self._recent_size = max((config.recent_size or 0) * rows // most, self._reach)

    @changes
    def _start(
        self,
        tokens: list[int],
        table: Table | None = None,
        unscored: bool = False,
        prefix: Prefix | None = None,
    ) -> None:
        """Hold these rows, at rest."""
        self._stand_on(prefix)
        self._table = table
        self._tokens = tokens
        self._unscored = unscored
        self._handed = HandedOut(self)
        self._free = 0  # tokens that may come one by one before anything else happens
        self._like: tuple[Any, ...] = ()  # shapes and dtypes of the last update
        self._length = 1
        self._spans = []
        self._waiting = []
        self._own_mask_due = False  # the mask of each layer's own has not been read yet
        self._make_ahead()

    def _make_ahead(self) -> None:
        """Have the table make room for all rows at once, where that was asked for."""
        wanted = self.config.preallocate
        if wanted and self._table is not None:
            rows = max(
                self._budget if self.config.max_kv_size else 0, 0 if wanted is True else wanted
            )
            spare = PROMPT_CHUNK if resolve().commits_pages() else 0  # costs no memory
            self._table.make_ahead(rows + spare)

    @property
    def offset(self) -> Any:
        """Tokens seen, which only ``trim`` lowers: RoPE is driven by it, not by ``size()``
        (AtomGradient 2026, sec. 3.3)."""
        return self._tokens[0]

    # Rows that come

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Evict what must go, append the new rows and return all rows for attention.

        Where a token finds the budget full, a group of ``config.group`` rows goes first. Several
        tokens are stored behind the others, so that bottom-right causal masks fit; what is then
        beyond the budget, the surplus, goes at the next update, or when somebody asks for
        ``state``, ``nbytes`` or ``size()`` once it has been attended to.

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
        like = keys.shape, values.shape, keys.dtype, values.dtype
        if self._like != like:
            self._check_rows(keys, values)
        elif self._free and not self._unscored:
            return self._append_one(keys, values)
        self._check_scored()
        if self._table is None:
            self._table = formats.new_table(
                self.config, keys, values, len(self._tokens), self._described()
            )
            self._make_ahead()
        added = keys.shape[2]
        spans = self._next_spans(added)
        counts = [stop - start for start, stop in spans]
        table = self._make_room(counts)
        self._like = like
        self._spans = spans if min(counts) < added else []
        self._free = self._room_for_one(table) if added == 1 else 0
        if self._free:
            return self._append_one(keys, values)
        return self._append(table, keys, values)

    @changes
    def _append(self, table: Table, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Any tokens, behind the others."""
        added, spans = keys.shape[2], self._next_spans(keys.shape[2])
        table.append(keys, values, self._tail_limit, self._spans)
        self._advance(spans)
        self._length = added
        self._unscored = self._needs_attention
        return self._hand_out(table)

    def _check_rows(self, keys: mx.array, values: mx.array) -> None:
        check_rows("H2OKVCache", keys, values, self._layouts())

    def _layouts(self) -> Sequence[tuple[Any, ...]]:
        """What rows are to be like; nothing while there are none."""
        return () if self._table is None else self._table.layouts

    def _room_for_one(self, table: Table) -> int:
        """How many tokens may come one by one before anything else happens than an append."""
        rows = table.tail.rows
        if self._reach or not min(table.lengths) or (self._mixed and table.ragged):
            return 0
        limit = self._tail_limit if self._mixed else self._budget
        left = min(self._budget - max(table.lengths), self._planned - max(self._tokens))
        return max(0, min(left, min(limit, table.tail.capacity) - max(rows)))

    def _append_one(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """One token where there is room: the step that nearly all steps are."""
        table = cast(Table, self._table)
        self._handed.release()
        self._free -= 1
        self._length = 1
        try:  # as ``changes``, in the place where a call more would count
            views = table.append_one(keys, values)
            self._tokens = [seen + 1 for seen in self._tokens]
            self._unscored = self._needs_attention
            return self._hand_out(table, views)
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Hold no rows, and say so to whoever asks for them."""
        self._table = cast(Table, Torn(self._described()))
        self._unscored = False
        if "_handed" in vars(self):  # not in one that could not even be made
            self._handed.release()

    def _next_spans(self, added: int) -> list[tuple[int, int]]:
        """Which of the next tokens are each line's own and no padding: from, and up to."""
        return [(0, added)]

    def _advance(self, spans: Sequence[tuple[int, int]]) -> None:
        pairs = zip(self._tokens, spans, strict=True)
        self._tokens = [seen + stop - start for seen, (start, stop) in pairs]

    @changes
    def _make_room(self, counts: Sequence[int]) -> Table:
        """Let go what is due before so many rows of each line come; at once again, nothing."""
        table, added, seen = cast(Table, self._table), max(counts), self._tokens[0]
        self._release()
        if self.config.rows_at:
            self._plan(max(self._tokens) + added)
        if self.config.preallocate:
            table.give_back()
        lengths = table.lengths
        both = enumerate(zip(lengths, table.tail.rows, strict=True))
        due = [n for n, (rows, new) in both if rows > self._budget or new > self._tail_limit]
        if due:
            self._settle_waiting(seen - self._reach)
            table = self._evict(table, due, self._budget, [0] * len(counts))
            lengths = table.lengths
        if self._reach:
            self._settle_waiting(seen + added - self._reach)
        keeps = [self._kept(rows, count) for rows, count in zip(lengths, counts, strict=True)]
        due = [line for line, keep in enumerate(keeps) if keep < lengths[line]]
        table = self._evict(table, due, keeps[due[0]] if due else 0, counts)
        if self._mixed:
            full = [n for n, rows in enumerate(table.tail.rows) if rows >= self._tail_limit]
            table = self._evict(table, full if added else [], _UNBOUNDED, counts)
        if added <= max(1, self._reach):
            table.fit(self._tail_limit)
        return table

    def _kept(self, rows: int, added: int) -> int:
        """Of a line's rows, how many stay when so many come."""
        need = rows + added - self._budget
        if need <= 0 or not 0 < added <= max(1, self._reach):
            return rows
        # Of those that no range protects, a whole group.
        evictable = rows - self._protected - max(0, self._recent_size - added)
        return rows - max(need, min(self._group, evictable))

    def _evict(self, table: Table, due: Sequence[int], keep: int, counts: Sequence[int]) -> Table:
        """Let all but the best ``keep`` rows of the lines in ``due`` go, before rows come."""
        if not due:
            return table
        ends = [seen + new for seen, new in zip(self._tokens, counts, strict=True)]
        recent, context = self._recent_size, self.config.context_size
        beyond = context and max(ends) - context > self.config.protected
        eviction = Eviction(
            table=table,
            policy=self.policy,
            config=self.config,
            offsets=self._tokens,
            due=due,
            keep=min(keep, table.width),
            recent_start=[end - recent for end in ends],
            tail=min(table.tail.rows[0], max(0, self._reach - max(counts))),
            skip=self._skip,
            sinks=self._protected,
            context_start=[end - context for end in ends] if context and beyond else (),
        )
        if self._mixed:
            self._table = table = tiers.packed(eviction)
        else:
            eviction.run()
        return table

    @property
    def _surplus(self) -> bool:
        """Whether rows of a chunk are there beyond the budget."""
        return self._table is not None and max(self._table.lengths, default=0) > self._budget

    def _release(self) -> None:
        """Before rows change otherwise than by one more: hold none that were handed out."""
        self._handed.release()
        self._free = 0

    def flush(self) -> None:
        """Let the surplus of a chunk go, and give up room that is no longer needed, as whoever
        reads ``state``, ``nbytes`` or ``size()`` does.

        Raises RuntimeError where the chunk still waits for its scores.
        """
        if self._surplus:
            self._check_scored()
        self._at_rest()

    def _at_rest(self) -> Table | None:
        table = self._table
        if table is not None and not self._unscored:
            if self._surplus or table.tail.capacity > self._tail_limit:
                table = self._make_room([0] * len(self._tokens))
            if self.config.preallocate:
                table.give_back()
        return table

    def _hand_out(self, table: Table, views: tuple[Parts, Parts] | None = None) -> tuple[Any, Any]:
        """Keys and values that are known from now on as this cache's; ``views`` of the tail."""
        tail, arrays = table.segments[-1], self._hands_arrays
        if views is None:
            width = table.shown - table.packed_width
            views = tail.keys.view(width), tail.values.view(width)
        parts, others = views
        mixed = len(table.segments) > 1
        if table.changed:
            # Whoever evaluates the keys evaluates these too: otherwise the graph of every step
            # would hang on them until the next eviction.
            loose = table.loose(self.policy.needs_scores and not mixed)
            parts = (mx.depends(parts[0], loose), *parts[1:])
            table.changed = False
        if mixed:
            newest = parts[0], others[0]
            keys, values = dense(table, "keys", newest[0]), dense(table, "values", newest[1])
            keys, values = _both_as_they_came(table, keys, values)
            return self._handed.give(keys, values, held=False, newest=newest)
        keys, values = tail.keys.given(parts, arrays), tail.values.given(others, arrays)
        # Arrays that are made of packed rows live no longer than attention needs them.
        unpacked = arrays and (tail.keys.bits or tail.values.bits)
        if unpacked:
            keys, values = _both_as_they_came(table, keys, values)
        return self._handed.give(keys, values, held=not unpacked)

    @property
    def _hands_arrays(self) -> bool:
        """Whether packed rows are handed out as arrays."""
        handed = self.config.kv_handed
        most = 1 if handed == "latents" else DECODE_QUERIES
        return handed not in ("packed", "latents") or self._length > most

    def _set(self, side: str, rows: Any) -> None:
        self._unshare()
        self._release()
        super()._set(side, rows)

    def keys_and_values(self) -> tuple[Any, Any]:
        """The rows as the last update returned them. Raises ValueError while there are none."""
        if self._table is None:
            raise ValueError("[H2OKVCache.keys_and_values] there are no rows yet.")
        return self._handed.rows or self._hand_out(self._table)

    # What there is

    @property
    def bits(self) -> int:
        """Bits of the keys, while the rows last returned are packed. Else there is no such
        attribute: mlx_lm's own attention asks for it first, and takes its presence for packed rows.

        Raises ValueError where that attention would be given what only ours can read: codes of
        rotated rows, or the mask of layers with unequal budgets.
        """
        if self._prefix is not None:
            raise ValueError(
                f"[{type(self).__name__}] {self._described()} shares its first "
                f"{self.prefix_rows} rows, of which mlx_lm's own attention does not know: expected "
                "the model to be called within mlx_h2o.routing(model)."
            )
        if self._own_mask_due:
            raise ValueError(
                f"[{type(self).__name__}] {self._described()} is of layers with unequal budgets, "
                "which need a mask each, and found mlx_lm's own attention, which takes one for "
                "all: expected the model to be called within mlx_h2o.routing(model), or one budget "
                "for all layers."
            )
        arrays = self._table is not None and (self.in_segments or self._hands_arrays)
        if self.config.kv_format is not None and self._table is not None and not arrays:
            raise ValueError(
                f"[{type(self).__name__}] {self._described()} has kv_format "
                f"{self.config.kv_format!r}, whose codes mlx_lm's own attention cannot read: "
                "expected mlx_h2o.generate, or the call within `with mlx_h2o.routing(model):`."
            )
        if self.config.framed and self._table is not None and not arrays:
            raise ValueError(
                f"[{type(self).__name__}] {self._described()} keeps its rows in a frame "
                "(kv_frame), of which mlx_lm's own attention does not know: expected "
                "mlx_h2o.generate, the call within `with mlx_h2o.routing(model):`, or "
                "kv_frame=False."
            )
        if self.config.kv_bits is None or arrays:
            raise AttributeError("bits: the rows of the last update were returned as arrays")
        return self.config.kv_bits

    @property
    def group_size(self) -> int:
        """Elements that share a scale and a bias, as stored; before the first row as set. Without
        ``kv_bits`` there is no such attribute."""
        if self.config.kv_bits is None:
            raise AttributeError("group_size: the rows have no groups")
        stored = None if self._table is None else self._table.segments[0].keys.group_size
        return stored or self.config.kv_group_size

    @property
    def needs_routing(self) -> bool:
        """Whether attention must be ours: it has to return scores, to read packed rows, or to take
        a mask of its layer's own."""
        served = self.config.packs or (self._in_batch and self.unequal_budgets)
        own = self.config.kv_handed in ("grouped", "fused")  # which reads arrays itself
        return self._needs_attention or (served and not own)

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | EachLayersMask | None:
        """The mask for the next ``length`` tokens over the rows that their update will return.

        None for one token; for more "causal" (bottom-right aligned) or, with ``return_array``,
        bool [length, slots]. bool [B, 1, length, slots] where sequences differ or any has padding,
        with one more axis of 1 behind the first where ``config.kv_handed`` is "grouped".
        What must go before these tokens come goes now, so that the mask fits what is left. With
        ``unequal_budgets`` an array would not fit all layers: the mask is then an object that each
        of them reads as its own.

        Raises:
            ValueError: ``window_size`` is given; slots do not tell how old a row is.
            RuntimeError: as ``update_and_fetch``, where the last update got no scores.
        """
        if window_size is not None:
            raise ValueError(
                f"[H2OKVCache.make_mask] window_size is {window_size}, expected None: "
                f"{self._described()} evicts rows, and cannot serve a sliding-window layer."
            )
        if self.unequal_budgets and (self._in_batch or (return_array and length > 1)):
            self._own_mask_due = True
            return EachLayersMask()
        at_once = self._free and length == 1
        if at_once and not self._mixed:
            return self._shaped(cast(Table, self._table).mask_of_one(1))
        spans = self._next_spans(length)
        rows = [[0] * len(spans)]
        if self._table is not None:
            if not at_once:
                self._check_scored()
                self._make_room([stop - start for start, stop in spans])
            rows = [one.rows for one in self._table.segments]
        return self._shaped(mask_of(rows, spans, length, return_array=return_array))

    def mask_of_update(self, *, return_array: bool = False) -> mx.array | str | None:
        """As ``make_mask``, for the tokens of the last update over the rows that it returned."""
        table, self._own_mask_due = cast(Table, self._table), False
        if self._length == 1 and not self._spans and not self._mixed:
            return self._shaped(table.mask_of_one(0))
        spans = self._spans or [(0, self._length)] * table.lines
        counts = [stop - start for start, stop in spans]
        *packed, tail = (one.rows for one in table.segments)
        before = [rows - count for rows, count in zip(tail, counts, strict=True)]
        rows = [*packed, before]
        return self._shaped(mask_of(rows, spans, self._length, return_array=return_array))

    def _shaped(self, found: mx.array | str | None) -> mx.array | str | None:
        if self.config.kv_handed == "grouped" and isinstance(found, mx.array) and found.ndim == 4:
            return mx.expand_dims(found, 1)
        return found

    # Rows that are taken back

    def is_trimmable(self) -> bool:
        """Whether ``trim`` is exact: until an eviction, done or due; with speculation always."""
        return self._reach > 0 or not (self.evicted or self._surplus)

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens, or all where there are fewer; returns how many.

        With speculation up to ``speculative + 1`` tokens leave no trace. Else the rows are exact;
        the scores that the taken back queries gave to the others remain. Raises ValueError where
        rows have been evicted that would have to come back.
        """
        if not isinstance(n, int):
            raise ValueError(f"[H2OKVCache.trim] n is {n!r}, expected an int.")
        if n <= 0 or self._table is None:
            return 0
        if n > min(self._table.lengths):
            self._unshare()
        table = self._table
        reach = min(self._reach, self._tokens[0])
        if n > reach and (self.evicted or self._surplus):
            wanted = f"at most {reach}" if self._reach else "none: see is_trimmable()"
            raise ValueError(
                f"[{type(self).__name__}.trim] {self._described()} has evicted rows and was asked "
                f"to take back {n} tokens, expected {wanted}."
            )
        return self._take_back(table, n)

    @changes
    def _take_back(self, table: Table, n: int) -> int:
        """The last ``n`` tokens, which may go."""
        self._release()
        gone = [min(n, rows) for rows in table.lengths]
        left = [rows - count for rows, count in zip(table.tail.rows, gone, strict=True)]
        self._cut_waiting(end=self._tokens[0] - n)
        if min(left) < 0:
            self._table = table = tiers.truncated(table, self._tokens, gone, self.config)
        else:
            table.truncate(left)
        self._tokens = [seen - count for seen, count in zip(self._tokens, gone, strict=True)]
        self._unscored = False
        if self.config.preallocate:
            table.give_back()
        return max(gone)

    # Rows that others have too

    def share(self, rows: int) -> None:
        """Have copies of this cache hold its first ``rows`` once, together.

        Whatever comes of it then stands on the same rows: deep copies, a batch of them, what is
        extracted of that. They are never evicted and never written. Attention must be that of
        ``routing``, or ``attend``.

        Raises:
            ValueError: rows that are not there or may be evicted, a cache that shares some already,
                or one that cannot: mixed precision, speculation, the rows of
                latent attention (MLA), several sequences.
        """
        op, config = f"[{type(self).__name__}.share]", self.config
        reason = unshareable(config)
        if self._in_batch or self._prefix is not None:
            reason = "a cache of several sequences" if self._in_batch else "shared rows already"
        if reason:
            raise ValueError(f"{op} {self._described()} has {reason}, expected none of that.")
        self.flush()
        held = 0 if self._table is None else self._table.width
        most = held if config.max_kv_size is None else min(held, config.prefix_size)
        if self._table is None or not 0 < rows <= most:
            raise ValueError(
                f"{op} rows is {rows}, expected 1 to {most}: {self._described()} holds {held} and "
                f"keeps the first {config.prefix_size} for good (prefix_size)."
            )
        prefix, table = Prefix.taken_from(self._table, self._tokens[0], rows, config.sparse_v)
        self._start(self._tokens, table, self._unscored, prefix)

    def unshared(self) -> Any:
        """This cache, or where it shares rows a copy that holds all of them itself."""
        if self._prefix is None:
            return self
        found = copy.deepcopy(self)
        found._unshare()
        return found

    @changes
    def _unshare(self) -> None:
        """Hold all rows itself."""
        if self._prefix is not None:
            self._release()
            self._table = self._whole
            self._stand_on(None)
            self._make_ahead()

    # State, copies, other forms

    @property
    def state(self) -> tuple[Any, ...]:
        """keys, values, scores, positions, offset, evicted, unscored, name, settings.

        The surplus of a chunk goes first, as in ``nbytes``. The first four are None in an empty
        cache. Leaves are arrays, ints, bools and strings, so that mlx_lm can save them; the
        settings are JSON. Later updates do not change what was read. With speculation two more:
        the scores of the newest queries, which wait, and the positions and numbers of these (JSON).
        With shared rows one more: their keys and values; the first four are then of the others.
        Where rows have been folded, scores are a pair: those, and the biases of the rows.
        """
        rows = self._own_rows()
        found = (*rows, self.offset, self.evicted, self._unscored, self.name, self._settings)
        return (*found, *self._waiting_state()) if self._reach else (*found, *self._shared_state())

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        # Also serves objects that were made without __init__.
        if len(state) not in (9, 10, 11, 12):
            raise ValueError(
                f"[H2OKVCache.state] found {len(state)} parts, expected 9: keys, values, scores, "
                "positions, offset, evicted, unscored, name, settings; 10 with shared rows; or 11 "
                "with speculation."
            )
        offset, _, unscored, name, settings, *more = state[4:]
        self._configure_as(settings, name)
        shared = more[0] if len(more) == 1 else None
        self._restore([int(offset)], state, bool(unscored), shared=shared)
        if len(more) > 1:  # three in earlier versions, which wrote where queries end
            self._restore_waiting(more[-2], more[-1], ends=len(more) == 3)

    def _own_rows(self) -> tuple[Any, ...]:
        """Keys, values, scores and positions, without those that are shared."""
        table = self._at_rest()
        if table is None:
            return None, None, None, None
        rows = formats.state_of(table, "keys"), formats.state_of(table, "values")
        return *rows, *self._beside(table)

    def _beside(self, table: Table) -> tuple[Any, mx.array]:
        """Scores, with biases where there are any, and positions of the rows of a table."""
        scores: Any = self._scores_of(table)
        if BIAS in table.beside:
            scores = scores, table.beside[BIAS][:, :, : table.width]
        return scores, table.positions(self._tokens)

    def _shared_state(self) -> tuple[Any, ...]:
        return () if self._prefix is None else (self._prefix.state,)

    @property
    def _settings(self) -> str:
        given = self.config.named()
        del given["preallocate"]  # of this process, and not of the rows
        usual = {"prefix_size": 0, "context_size": None, "fold": True, "rows_at": ()}
        for name, value in usual.items():
            if given[name] == value:  # files are what they always were
                del given[name]
        if given["kv_frame"] == _framed_by_default(given):
            del given["kv_frame"]
        if self.unequal_budgets:  # else it is not there, and files are what they always were
            given["unequal_budgets"] = True
        if self.config.kv_format is not None and (layouts := self._layouts()):
            given["dtype"] = dtype_name(layouts[1][3])
        if self.config.framed and (layouts := self._layouts()):
            size = layouts[1][2]
            if kept_size(size) != size:
                given["value_size"] = size
        return json.dumps(given)

    def _configure_as(self, settings: str, name: str) -> None:
        given = json.loads(settings)
        unequal = bool(given.pop("unequal_budgets", False))
        self._value_size = int(given.pop("value_size", 0))
        for gone, usual in _GONE.items():
            if (value := given.pop(gone, usual)) != usual:
                raise ValueError(
                    f"[H2OKVCache] {gone} is {value!r}, expected {usual!r}: this setting of "
                    "earlier versions is gone."
                )
        given.setdefault("kv_frame", _framed_by_default(given))
        self._came_in = getattr(mx, given.pop("dtype", "float32"))
        if "diversity" not in given and given["policy"] == "h2o":
            given["policy"] = "h2o-ema"  # as it was called when there was none
        self._configure(H2OConfig.of(**given), name)
        self.unequal_budgets = unequal

    def _restore(
        self,
        tokens: list[int],
        state: Sequence[Any],
        unscored: bool,
        rows: Any = None,
        shared: Any = None,
    ) -> None:
        """Hold the keys, values, scores and positions of a state, so many ``rows`` in each
        segment; None: all; and the keys and values that are ``shared``."""
        keys, values, importance, positions = state[:4]
        table = bias = None
        if isinstance(importance, tuple | list):
            importance, bias = importance
        if importance is not None:
            given = self._came_in, self._value_size
            table = formats.restored_table(self.config, keys, values, rows, *given)
            table.place(positions)
            if self.policy.needs_attention:
                table.attach(IMPORTANCE, importance, mx.nan)
            if bias is not None:
                table.attach(BIAS, bias, 0.0)
        prefix = None
        if shared is not None:
            keys, values = shared
            frame = None
            if table is not None and table.frame is not None:
                frame = table.frame = table.frame.as_shared()
                keys = (*keys, frame.centre)
            tail = formats.restored_table(self.config, keys, values, None, self._came_in).tail
            prefix = Prefix(tail.keys, tail.values, self.config.sparse_v, frame)
        self._start(tokens, table, unscored, prefix)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> H2OKVCache:
        """A cache with the given ``state``, settings included."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __copy__(self) -> H2OKVCache:
        return copy.deepcopy(self)  # rows change in place: nobody could share them

    def __reduce__(self) -> Any:
        raise ValueError(
            f"[{type(self).__name__}] a cache was to be pickled, expected "
            "mlx_h2o.save_prompt_cache to keep it."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> H2OKVCache:
        self.flush()
        found = object.__new__(type(self))
        vars(found).update(vars(self))
        memo[id(self)] = found
        found._handed = HandedOut(found)
        found._table = self._table and self._table.copy()
        return found

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """One cache of several sequences, for batches: see ``BatchH2OKVCache.merge``."""
        return cls._batch.merge(caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """The same rows, scores and positions in a cache that quantises: QuantizedH2OKVCache.

        Later rows are quantised as they come. This cache stays as it is.

        Raises:
            ValueError: bits or sizes that H2OConfig refuses, or rows that cannot be quantised.
            RuntimeError: a chunk still waits for its scores.
        """
        config = replace(self.config, format=Affine(bits, kv_group_size=group_size))
        self.flush()
        cache = self._packed(config, name=self.name)
        keys, values = self.keys, self.values
        if keys is not None:
            keys, values = formats.quantized(config, keys, values, self._described())
        whole = self._whole
        state = keys, values, *((None, None) if whole is None else self._beside(whole))
        cache._restore(self._tokens, state, self._unscored)
        cache._restore_waiting(*self._waiting_state())
        cache.unequal_budgets = self.unequal_budgets
        return cache

    def _check_scored(self) -> None:
        """Eviction is never silently off."""
        if self._unscored:
            scores = self.policy.needs_scores
            what, them = ("scores", "them") if scores else ("attention of mlx_h2o's", "it")
            if self._prefix is not None and not self.policy.needs_attention:
                raise RuntimeError(
                    f"[H2OKVCache] {self._described()} got no {what} for its last update, and "
                    f"shares its first {self.prefix_rows} rows, which need it: call the model "
                    "within mlx_h2o.routing(model)."
                )
            raise RuntimeError(
                f"[H2OKVCache] {self._described()} got no {what} for its last update, and the "
                f"policy {self.policy.name!r} needs {them}: call the model within "
                "mlx_h2o.routing(model), or choose a policy that needs none."
            )

    def _described(self) -> str:
        return f"the cache of {self.name}" if self.name else "this cache"


def _both_as_they_came(table: Table, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    frame = table.frame
    return as_they_came(frame, keys, "keys"), as_they_came(frame, values, "values")


def _framed_by_default(settings: dict[str, Any]) -> bool:
    """What settings mean that do not name ``kv_frame``: those of packed rows are older."""
    return settings.get("kv_bits") is None or settings.get("kv_handed") == "latents"
