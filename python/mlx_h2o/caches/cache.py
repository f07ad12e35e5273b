"""The evicting KV cache: when rows are added and evicted, and the members that mlx_lm needs."""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import mlx.core as mx

from ..config import Affine, H2OConfig
from ..errors import check
from ..operations.backends import resolve
from . import attention, checks, formats, saved, tiers
from .column import Parts
from .handed_out import EachLayersMask, hand_out
from .room import Room
from .scores import cut, of_chunk, of_scores, seen, settle, store, wait, waiting
from .step import NO_PADDING, Padding, Step
from .table import BIAS, IMPORTANCE, POSITIONS, Table, join, select
from .torn import Torn, changes
from .views import unpacked

PROMPT_CHUNK = 2048
"""Tokens of a prompt that mlx_lm reads at a time."""


def _side(side: str) -> Any:
    """The property "keys" or "values"."""

    def stored(cache: H2OKVCache) -> Any:
        return None if cache.empty() else saved.stored(cache._table.whole, side)

    def put(cache: H2OKVCache, rows: Any) -> None:
        if cache.empty():
            raise ValueError(f"[H2OKVCache.{side}] an array was set, but no rows are stored.")
        cache._unshare()
        cache._table.free = 0
        saved.set_rows(cache._table, side, rows)

    doc = f"""The stored {side} [B, H, N, size], or None. May be set to others of the same shape.

    Where rows are quantised: their words, scales and biases."""
    return property(stored, put, doc=doc)


class H2OKVCache(saved.Restorable):
    """Keys and values of one layer; a policy keeps ``config.max_kv_size`` rows per head.

    Replaces mlx_lm's KVCache without subclassing it: a subclass would inherit a batched form
    that does not evict. A step evicts by the scores so far, appends, attends, and accumulates the
    new scores. It begins with ``make_mask`` or ``update_and_fetch``. Below the budget, rows are in
    order of position. After evictions they are in no order, except that the rows of the last update
    come last, in order. The cache never evaluates an array.

    Args:
        config: the settings; None for the defaults.
        name: the name of this cache in error messages, such as "qwen3 layer 3".

    Attributes:
        policy: ranks the rows.
        unequal_budgets: whether other layers of the model have different budgets, so that they
            cannot share one mask; saved with the rows.

    Raises:
        ValueError: ``config.kv_bits`` is set; use :class:`QuantizedH2OKVCache` for that.
    """

    _default: ClassVar[H2OConfig] = H2OConfig()
    _quantized: ClassVar[bool | None] = False
    """Whether rows must be quantised; None: either way."""
    _in_batch: ClassVar[bool] = False
    """Whether the cache holds several sequences, which may differ in length."""

    _table: Table
    """The rows, their scores and the tokens seen."""
    keys, values = _side("keys"), _side("values")

    def __init__(self, config: H2OConfig | None = None, *, name: str = "") -> None:
        self._configure(self._default if config is None else config, name)
        self._hold(Table([], [0]))

    def _configure(self, config: H2OConfig, name: str, unequal_budgets: bool = False) -> None:
        cls, wanted = type(self).__name__, "an H2OConfig, such as H2OConfig.of()"
        check(isinstance(config, H2OConfig), "config", config, wanted, operation=cls)
        wanted = "a number, or H2OKVCache" if self._quantized else "None, or QuantizedH2OKVCache"
        right = self._quantized in (None, config.kv_bits is not None)
        check(right, "kv_bits", config.kv_bits, wanted, operation=cls)
        self.config, self.policy = config, config.policy
        self.name, self.unequal_budgets = name, unequal_budgets

    @changes
    def _hold(self, table: Table, padding: Sequence[Padding] = ()) -> None:
        """Replace the table and the padding still to come, and reset everything about steps."""
        self._table, self._padding = table, list(padding) or [NO_PADDING] * len(table.tokens)
        self._like: tuple[Any, ...] = ()  # shapes and dtypes of the last update
        self._step = Step(1, len(self._padding))  # of the last update
        self._own_mask_due = False  # an EachLayersMask was returned and not read yet
        self.handed: Callable[[], Any] = lambda: None  # the keys, or words, handed out last
        self._stand()

    def _stand(self) -> None:
        """Plan the room, given how many of the first rows are shared (possibly none)."""
        config = self.config
        self._room = Room(config, self._table)
        # Only our attention handles scores, biases and shared rows.
        self._needs_attention = self.policy.needs_attention or bool(self.prefix_rows)
        if config.preallocate and self._table.segments:  # allocate all slots at once
            wanted = 0 if config.preallocate is True else config.preallocate
            spare = PROMPT_CHUNK if resolve().commits_pages() else 0  # unused pages are free
            budget = max(self._room.budgets) if config.max_kv_size else 0
            self._table.tail.ahead = max(budget, wanted) + spare

    # What the cache holds

    @property
    def offset(self) -> Any:
        """Number of tokens seen, the position of the next token for RoPE (AtomGradient 2026, sec.
        3.3). Only ``trim`` lowers it. In a batch int32 [B], less the padding still to come."""
        if not self._in_batch:
            return self._table.tokens[0]
        pairs = zip(self._table.tokens, self._padding, strict=True)
        return mx.array([seen - left for seen, (left, _) in pairs], mx.int32)

    @property
    def scores(self) -> mx.array | None:
        """float32 [B, H, N]: the accumulated score of each row, NaN if it has none yet."""
        return None if self.empty() else self._table.whole.filled(IMPORTANCE)

    @property
    def row_bias(self) -> mx.array | None:
        """float32 [B, H, at least N]: what attention adds to the logits of a row, ``log(n)`` if it
        stands for n rows; None until rows have been folded."""
        return self._table.whole.beside.get(BIAS)

    @property
    def positions(self) -> mx.array | None:
        """int32 [B, H, N]: the position in the sequence of each stored row, -1 in unused slots."""
        return None if self.empty() else self._table.whole.positions

    @property
    def prefix_rows(self) -> int:
        """Number of first rows per head that are shared with other caches."""
        return self._table.prefix_rows

    @property
    def evicted(self) -> int:
        """Rows evicted per head, summed over all sequences."""
        return self._table.evicted

    @property
    def nbytes(self) -> int:
        """Bytes of every array stored: keys, values, scores, positions, and room for more.

        Evicts rows beyond the budget first, as ``flush`` does, unless their scores are pending.
        Shared rows count once for all sequences of a cache, and again in each cache."""
        return self._at_rest().nbytes

    @property
    def held_nbytes(self) -> int:
        """Like ``nbytes``, but evicts nothing: rows of a chunk beyond the budget count."""
        return self._table.nbytes

    def size(self) -> int:
        """Rows stored per head, shared ones included. Evicts rows as ``nbytes`` does."""
        return max(self._at_rest().lengths, default=0) + self.prefix_rows

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return not self._table.segments

    # Appending rows

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Evict rows if needed, append the new rows, and return all rows for attention.

        If the budget is full, a single token first evicts ``config.group`` rows. A chunk of several
        tokens is appended whole, after the other rows, so that bottom-right causal masks fit. Rows
        then beyond the budget (the surplus) are evicted after attention: at the next update, or
        when ``state``, ``nbytes`` or ``size()`` is read.

        Args:
            keys: [B, H, L, D] with RoPE applied, L at least 1.
            values: [B, H, L, Dv].

        Returns:
            keys [B, H, N, D] and values [B, H, N, Dv], the new rows last. If rows are quantised and
            L is at most 8, both are packed: words, scales and biases. For more tokens they are
            arrays, in which the new rows are still unquantised.

        Raises:
            ValueError: shapes or dtypes that do not match each other or the stored rows.
            RuntimeError: the policy needs scores, and there were none after the last update.
        """
        like, held = (keys.shape, values.shape, keys.dtype, values.dtype), self._table
        if self._like != like:
            if self.config.packs and keys.dtype != values.dtype:  # packing needs one dtype
                common = mx.result_type(keys, values)
                return self.update_and_fetch(keys.astype(common), values.astype(common))
            checks.check_rows(self, keys, values)
        elif held.free >= self._step.length and not held.unscored:
            return self._append(keys, values)
        checks.check_scored(self)
        if self.empty():
            given = len(self._padding), self._described()
            self._table = formats.new_table(self.config, keys, values, *given)
            self._stand()
        self._step = Step.of(keys.shape[2], self._padding)
        table = self._make_room(self._step.counts)
        self._like = like
        if all(one == NO_PADDING for one in self._padding):
            table.free = self._room.free(table, self._step.length)
        return self._append(keys, values)

    def _append(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append the rows of the step's tokens."""
        table, step = self._table, self._step
        try:  # ``changes`` inlined: here one more call would be measurable
            if table.free >= step.length:  # nearly always
                views = table.append(keys, values, step)
                table.free -= step.length
            else:
                views = table.append(keys, values, step, self._room.tail_limit)
                table.free, self._padding = 0, step.after(self._padding)
            table.unscored = self._needs_attention
            return self._hand_out(table, views, (keys, values))
        except BaseException:
            self._give_up()
            raise

    @property
    def _hands_arrays(self) -> bool:
        """Whether the last update returned packed rows as arrays."""
        most = {"packed": attention.DECODE_QUERIES, "latents": 1}
        return self._step.length > most.get(self.config.kv_handed, 0)

    def _give_up(self) -> None:
        """Drop the rows, so that any later access raises an error that says why."""
        self._table = cast(Table, Torn(self._described()))

    @changes
    def _make_room(self, counts: Sequence[int]) -> Table:
        self._table = table = self._room.make(self._table, counts)
        table.free = 0
        return table

    def flush(self) -> None:
        """Evict the rows of a chunk beyond the budget and release unused buffer space, as reading
        ``state``, ``nbytes`` or ``size()`` does.

        Raises RuntimeError while the scores of the chunk are pending.
        """
        if self._room.surplus(self._table):
            checks.check_scored(self)
        self._at_rest()

    def _at_rest(self) -> Table:
        table = self._table
        if table.segments and not table.unscored:
            if self._room.surplus(table) or table.tail.capacity > self._room.tail_limit:
                table = self._make_room([0] * len(table.tokens))
            table.tail.give_back()
        return table

    def _hand_out(
        self, table: Table, views: tuple[Parts, Parts], came: Sequence[mx.array] = ()
    ) -> tuple[Any, Any]:
        """Keys and values for attention, registered as this cache's: ``views`` of the tail. As
        arrays, the new rows are ``came``, as they were before they were packed."""
        tail, mixed = table.segments[-1], len(table.segments) > 1
        parts, others = views
        if table.changed:
            # Evaluating the keys must evaluate these too: otherwise they would keep the graph of
            # every step alive until the next eviction. Attention updates scores, and would copy
            # them if anything else read them; it ties them to its output.
            own = self.policy.needs_scores and not mixed
            loose = [one for name, one in table.beside.items() if not own or name == POSITIONS]
            parts = (mx.depends(parts[0], loose), *parts[1:])
            table.changed = False
        if mixed or ((tail.keys.bits or tail.values.bits) and self._hands_arrays):
            keys, values = unpacked(table, (parts, others), self._step, came)
        else:
            keys, values = tail.keys.given(parts), tail.values.given(others)
        return hand_out(self, keys, values, (parts[0], others[0]) if mixed else None)

    def keys_and_values(self) -> tuple[Any, Any]:
        """The stored rows in the form in which the last update returned them, for layers of mlx_lm
        that read the rows of another layer. Raises ValueError if there are none."""
        table = self._table
        if not table.segments:
            raise ValueError("[H2OKVCache.keys_and_values] there are no rows yet.")
        return self._hand_out(table, table.tail.view(table.shown - table.packed_width))

    @property
    def bits(self) -> int:
        """Bits of the keys, if the last update returned packed rows. Otherwise the attribute is
        missing: mlx_lm's own attention tests for it to recognise packed rows.

        Raises ValueError if only the attention of this package can read the rows or the mask: for
        codes of rotated rows, and with unequal budgets.
        """
        config, table = self.config, self._table
        # Only our attention reads rows in several parts; others get the arrays handed out.
        arrays = not self.empty() and (self._hands_arrays or len(table.segments) > 1)
        packed = not (self.empty() or arrays)
        checks.check_stock_attention(self, packed, own_mask=self._own_mask_due)
        if config.kv_bits is None or arrays:
            raise AttributeError("bits: the rows of the last update were returned as arrays")
        return config.kv_bits

    @property
    def group_size(self) -> int:
        """Elements that share a scale and a bias, as stored, or before the first row as configured.
        Without ``kv_bits`` the attribute is missing."""
        if self.config.kv_bits is None:
            raise AttributeError("group_size: the rows have no groups")
        stored = (one.keys.group_size for one in self._table.segments)
        return next(stored, None) or self.config.kv_group_size

    @property
    def needs_routing(self) -> bool:
        """Whether the model must run within ``mlx_h2o.routing``: to return scores, to read packed
        rows, or to use a separate mask for this layer."""
        served = self.config.packs or (self._in_batch and self.unequal_budgets)
        own = self.config.kv_handed in ("grouped", "fused")  # own attention reads arrays
        return self._needs_attention or (served and not own)

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | EachLayersMask | None:
        """The mask for the next ``length`` tokens over the rows that their update will return.

        None for one token; for more "causal" (bottom-right aligned) or, with ``return_array``,
        bool [length, slots]. If sequences differ or have padding, bool [B, 1, length, slots],
        with another axis of 1 after the first if ``config.kv_handed`` is "grouped".
        Rows that these tokens will replace are evicted first, so that the mask fits. With
        ``unequal_budgets`` one array would not fit all layers: the mask is then an object that
        each layer replaces with its own mask.

        Raises:
            ValueError: ``window_size`` is given; slots are not in order of position.
            RuntimeError: as in ``update_and_fetch``.
        """
        if window_size is not None:
            raise ValueError(
                f"[H2OKVCache.make_mask] window_size is {window_size}, expected None: "
                f"{self._described()} evicts rows, and cannot serve a sliding-window layer."
            )
        if self.unequal_budgets and (self._in_batch or (return_array and length > 1)):
            self._own_mask_due = True
            return EachLayersMask()
        table = self._table
        if table.free and length == 1 == len(table.segments):  # nearly always
            slots, width = table.segments[0].next_slots(), table.shown + 1
            return None if slots is None else self._shaped(mx.arange(width) <= slots)
        step = Step(length, len(self._padding))
        if table.free < length:
            step = Step.of(length, self._padding)
            checks.check_scored(self)
            table = self._make_room(step.counts)
        rows = [one.rows for one in table.segments] or [table.tokens]
        return self._shaped(step.mask(rows, return_array))

    def mask_of_update(self, *, return_array: bool = False) -> mx.array | str | None:
        """Like ``make_mask``, for the tokens of the last update and the rows that it returned."""
        table, step, self._own_mask_due = self._table, self._step, False
        *packed, tail = (one.rows for one in table.segments)
        before = [rows - count for rows, count in zip(tail, step.counts, strict=True)]
        return self._shaped(step.mask([*packed, before], return_array))

    def _shaped(self, found: mx.array | str | None) -> mx.array | str | None:
        if self.config.kv_handed == "grouped" and isinstance(found, mx.array) and found.ndim == 4:
            return mx.expand_dims(found, 1)
        return found

    # Attention

    def attend(
        self, queries: mx.array, keys: Any, values: Any, *, scale: float,
        mask: mx.array | str | None = None, sinks: mx.array | None = None,
        stock: Callable[[], mx.array] | None = None,
    ) -> mx.array:  # fmt: skip
        """Attention over the rows of the last update, followed by accumulating its scores.

        Like ``fast.scaled_dot_product_attention_with_scores`` and ``update_scores``, but in one
        operation that need not store the scores, if the policy allows it. Evaluating the output
        evaluates both. For more than 8 queries, scores are computed separately from the output, if
        the policy allows it in blocks, so that they are never in memory all at once.

        Args:
            stock: another attention function over the same arrays. It computes the output if rows
                are not shared, packed or folded, and no scores are needed or there are more than 8
                queries.

        Raises:
            ValueError: no rows yet, keys that are not the stored rows, or as in the operation.
        """
        table, scored = self._table, self.policy.needs_scores
        asked = queries, keys, values, scale, mask, sinks
        short = queries.shape[2] <= attention.DECODE_QUERIES
        if table.prefix is not None or BIAS in table.beside:
            stock = None
        if stock is not None and not scored:
            packed = isinstance(keys, tuple) or isinstance(values, tuple)
            mixed = len(table.segments) > 1
            if not (short and (packed or mixed)):
                table.unscored = False
                return attention.without_scores(asked) if short else stock()
        stored = keys[0] if isinstance(keys, tuple) else keys
        known = self.handed() is stored and stored.shape[2] == table.shown
        own = known or checks.check_seen("attend", stored, 2, table)
        if short:
            whole = own and not (self.config.reach or self._step.spans)
            newest = cast(Any, self.handed).rows if own and len(table.segments) > 1 else None
            out, found, lse = attention.attend(table, self.config, asked, newest, whole)
            if found is not None:
                self.update_scores(found, lse=lse, masked=mask is not None)
            elif scored:  # attention has accumulated them
                return out
        else:
            out = attention.attend_chunk(table, asked) if stock is None else stock()
            if scored:
                self._take(of_chunk(self.config, table, self._step, asked))
        if not scored:
            table.unscored = False
            return out
        return cast(mx.array, mx.depends(out, list(table.beside.values())))

    def update_scores(
        self, scores: mx.array, *, lse: mx.array | None = None, masked: bool = True
    ) -> None:
        """Accumulate the scores of the attention that followed an update.

        Layers that share their keys may call this several times for one update; each call counts
        as further queries. For policies without scores it only marks that attention is done.

        Args:
            scores: float32 [B, Hq, L, N], logits before the softmax, -inf where masked, the
                queries in order, N the rows stored. Most policies count only the last 128 queries.
            lse: float32 [B, Hq, L], for policies that use weights, ``exp(scores - lse)``; None:
                computed from these scores, which is right for attention without sinks.
            masked: False if no score is -inf, which saves work.

        Raises:
            ValueError: no rows yet, or another shape or dtype.
        """
        table = self._table
        checks.check_seen("update_scores", scores, 3, table)
        if self.policy.needs_scores:
            given = seen(self.policy, scores, lse)
            self._take(of_scores(self.config, table, self._step, given, masked))
        table.unscored = False

    @changes
    def _take(self, found: tuple[Any, mx.array | None]) -> None:
        """Store the new importance, and with speculation the scores that are still pending."""
        table = self._table
        store(self.policy, table, *found)
        if self.config.reach:
            settle(self.policy, table, table.tokens[0] - self.config.reach)

    # Taking tokens back

    def is_trimmable(self) -> bool:
        """Whether ``trim`` is possible: before the first eviction, and with speculation always."""
        return self.config.reach > 0 or not (self.evicted or self._room.surplus(self._table))

    def trim(self, n: int) -> int:
        """Remove the last ``n`` tokens, or all if there are fewer; returns how many.

        With speculation, up to ``speculative + 1`` tokens leave no trace. Otherwise the rows are
        exact, but the scores that the removed queries gave to other rows remain. Raises ValueError
        if evicted rows would have to be restored.
        """
        check(hasattr(n, "__index__"), "n", n, "an int", operation="H2OKVCache.trim")
        n = operator.index(n)
        if n <= 0 or self.empty():
            return 0
        if n > min(self._table.lengths):
            self._unshare()
        table = self._table
        reach = min(self.config.reach, table.tokens[0] - table.certain)
        if n > reach and (self.evicted or self._room.surplus(self._table)):
            wanted = f"at most {reach}" if self.config.reach else "none: see is_trimmable()"
            raise ValueError(
                f"[{type(self).__name__}.trim] {self._described()} has evicted rows and was asked "
                f"to take back {n} tokens, expected {wanted}."
            )
        return self._take_back(table, n)

    @changes
    def _take_back(self, table: Table, n: int) -> int:
        """Remove the last ``n`` tokens; the caller has checked that it is possible."""
        gone = [min(n, rows) for rows in table.lengths]
        left = [rows - count for rows, count in zip(table.tail.rows, gone, strict=True)]
        cut(self.policy, table, end=table.tokens[0] - n)
        if min(left) < 0:
            self._table = table = tiers.truncated(table, gone)
        else:
            table.truncate(left)
            table.tokens = [seen - count for seen, count in zip(table.tokens, gone, strict=True)]
            table.free = table.free + n if table.free and min(table.lengths) else 0
        table.unscored = False
        if self.config.preallocate:  # saves a call for every draft
            table.tail.give_back()
        return max(gone)

    # Shared rows

    def share(self, rows: int) -> None:
        """Share the first ``rows`` with copies of this cache instead of copying them.

        Deep copies, batches of them, and sequences extracted from these use the same rows, which
        are never evicted or changed. Attention must run within ``mlx_h2o.routing``, or be
        ``attend``.

        Raises ValueError for rows that do not exist or may be evicted, and for a cache that already
        shares rows or cannot: ``light_bits``, speculation, MLA, several sequences.
        """
        op, config = f"{type(self).__name__}.share", self.config
        reason = formats.unshareable(config)
        if self._in_batch or self.prefix_rows:
            reason = "several sequences" if self._in_batch else "shared rows already"
        if reason:
            raise ValueError(f"[{op}] {self._described()} has {reason}, and cannot share rows.")
        self.flush()
        held = self._table.width
        most = held if config.max_kv_size is None else min(held, config.prefix_size)
        kept = f"keeps the first {config.prefix_size} for good (prefix_size)"
        wanted = f"1 to {most}: {self._described()} holds {held} and {kept}"
        (count,) = checks.whole_numbers([rows], most) or [0]
        check(count > 0, "rows", rows, wanted, operation=op)
        if config.mixed:  # no row changes once it is shared
            self._table = tiers.more_packed(self._table, newest=0)
        self._hold(self._table.standing(count))

    def unshared(self) -> Any:
        """This cache, or if it shares rows a copy with all rows of its own."""
        if not self.prefix_rows:
            return self
        found = copy.deepcopy(self)
        found._unshare()
        return found

    @changes
    def _unshare(self) -> None:
        """Copy the shared rows into this cache's own table."""
        if self.prefix_rows:
            self._table = self._table.whole
            self._stand()

    # State, copies, other forms

    @property
    def state(self) -> tuple[Any, ...]:
        """keys, values, scores, positions, offset, evicted, unscored, name, settings.

        Rows beyond the budget are evicted first, as in ``nbytes``. The first four are None in an
        empty cache. Leaves are arrays, ints, bools and strings, so that mlx_lm can save them; the
        settings are JSON. Later updates do not change a state. With speculation there are two more
        parts: pending scores of the newest queries, and the positions and numbers of these (JSON).
        With shared rows there is one more: their keys and values; the first four are the other
        rows. If rows have been folded, scores are a pair: scores, and biases of the rows. In a
        batch the first four are followed by unscored, name, sequences (JSON) and settings.
        """
        table = self._at_rest()
        rows, settings, unscored = saved.rows_of(table), saved.settings_text(self), table.unscored
        more: tuple[Any, ...] = () if table.prefix is None else (table.prefix.view(),)
        if self._in_batch:
            about = unscored, self.name, saved.sequences_text(self._padding, table)
            return (*rows, *about, settings, *more)
        if self.config.reach:
            more = waiting(self.policy, table), json.dumps(table.waiting)
        return (*rows, self.offset, self.evicted, unscored, self.name, settings, *more)

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        # Must also work on objects made without __init__.
        least, most = (8, 9) if self._in_batch else (9, 12)
        if not least <= len(state) <= most:
            raise ValueError(
                f"[{type(self).__name__}.state] found {len(state)} parts, expected {least} to "
                f"{most}, as the state of another cache has."
            )
        if self._in_batch:
            unscored, name, text, settings, *more = state[4:]
            batch = json.loads(text)
            padding = list(zip(batch["before"], batch["remaining"], strict=True))
            tokens, rows = batch["tokens"], batch["rows"]
        else:
            offset, _, unscored, name, settings, *more = state[4:]
            tokens, rows, padding = [int(offset)], None, []
        config, unequal, kept = saved.read_settings(settings)
        self._configure(config, name, unequal)
        shared = more[0] if len(more) == 1 else None
        table = saved.table_of(config, tokens, state, rows, shared, *kept)
        table.unscored = bool(unscored)
        if len(more) > 1 and more[-2] is not None:
            wait(self.policy, table, more[-2], saved.places_of(more))
        self._hold(table, padding)
        if self.config.reach and self.evicted:  # the newest rows in order can be taken back
            places, first = mx.arange(table.width), table.tokens[0] - table.width
            moved = mx.where(table.positions - places == first, 0, places + 1)
            table.certain = first + cast(int, mx.max(moved).item())

    def __deepcopy__(self, memo: dict[int, Any]) -> H2OKVCache:
        self.flush()
        found = object.__new__(type(self))
        vars(found).update(vars(self))
        memo[id(self)] = found
        found._table = self._table.copy()
        found._room = copy.copy(self._room)
        return found

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """A QuantizedH2OKVCache with the same rows, scores and positions.

        Later rows are quantised when they arrive. This cache does not change. If it is quantised
        already, it is returned itself, since mlx_lm calls this after every step.

        Raises:
            ValueError: bits or sizes that H2OConfig refuses, rows that cannot be quantised, a batch
                of unquantised rows, or for a quantised cache other settings than its own: no row is
                quantised twice.
            RuntimeError: the scores of a chunk are pending.
        """
        if self.config.packs:
            own = self.config.kv_group_size, self.config.kv_bits
            if (group_size, bits) != own:
                raise ValueError(
                    f"[QuantizedH2OKVCache.to_quantized] found group_size {group_size} and bits "
                    f"{bits}, expected {own[0]} and {own[1]} as {self._described()} has: rows are "
                    "quantised once."
                )
            return self
        if self._in_batch:
            raise ValueError("[H2OKVCache.to_quantized] found a batch, expected one sequence.")
        config = replace(self.config, format=Affine(bits, dense_size=0, kv_group_size=group_size))
        self.flush()
        return self._another(config, formats.quantized(config, self._table, self._described()))

    def _described(self) -> str:
        return f"the cache of {self.name}" if self.name else "this cache"

    # Batches

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchH2OKVCache:
        """A batch of the sequences of these caches, which hold one each, with equal settings.

        Raises ValueError for no caches, settings that differ, another class, or batches; and if
        layers have unequal budgets and the model's attention can take only one mask.
        """
        checks.check_mergeable(caches, H2OKVCache)
        batch = BatchH2OKVCache(caches[0].config, name=caches[0].name)
        batch._join(caches)
        return batch

    def _another(self, config: H2OConfig, table: Table) -> H2OKVCache:
        """A cache of one sequence, with these rows and settings."""
        found = evicting_cache(config, name=self.name)
        found.unequal_budgets = self.unequal_budgets
        found._hold(table)
        return found


class QuantizedH2OKVCache(H2OKVCache):
    """An :class:`H2OKVCache` whose rows are quantised once, on arrival (``config.kv_bits``).

    Rows are evicted, moved, saved and copied in packed form; only rows that others are folded into
    are quantised again. For up to 8 tokens, updates return packed rows (words, scales and biases,
    for keys and values), which the fused kernels read within ``mlx_h2o.routing``. For longer chunks
    they return arrays, in which the chunk's own rows are unquantised. ``keys`` and ``values`` are
    packed.

    In mixed precision (``config.light_bits``, ``config.dense_rows``) the newest rows are not
    quantised yet; each row is quantised once, later. Updates then return arrays, which are computed
    only if attention does not read the rows as they are stored.

    Outside of ``mlx_h2o.routing``, mlx_lm's own attention can read rows with ``kv_frame=False``,
    unfused, as it reads QuantizedKVCache. It refuses others, and values of other bits than keys.

    Args:
        config: the settings; None for the defaults with 8 bits.
        name: the name of this cache in error messages, such as "qwen3 layer 3".

    Raises:
        ValueError: ``config.kv_bits`` is None; at the first update, with ``kv_frame=False``, rows
            whose size is not a multiple of 32.
    """

    _default = H2OConfig(format=Affine())
    _quantized = True


class BatchH2OKVCache(H2OKVCache):
    """Several sequences of one layer, each of which evicts as it would alone.

    Made by ``H2OKVCache.merge``; ``extract`` returns one sequence. The rows of a sequence fill its
    first slots. Unused slots and padding tokens are masked, padding is never kept instead of a row,
    and its queries do not count towards scores.
    """

    _quantized = None
    _in_batch = True

    def __init__(
        self, config: H2OConfig | None = None, batch_size: int = 0, *, name: str = ""
    ) -> None:
        super().__init__(config, name=name)
        self._hold(Table([], [0] * batch_size))

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce padding among the tokens to come, before the model is called.

        Args:
            left_padding: padding tokens that come first; only while the batch is empty.
            lengths: tokens of each sequence before ``finalize``; further ones are padding.
            right_padding: the number of those; needs ``lengths``.

        Raises:
            ValueError: numbers other than one per sequence, or padding at a wrong moment.
        """
        op, count = "BatchH2OKVCache.prepare", len(self._padding)
        given = {"left_padding": left_padding, "lengths": lengths, "right_padding": right_padding}
        wanted = f"{count} numbers of at least 0, one per sequence"
        found: dict[str, Any] = {}
        for name, numbers in given.items():
            if numbers is not None:
                found[name] = checks.whole_numbers(numbers, count=count)
                check(found[name] is not None, name, numbers, wanted, operation=op)
        if "left_padding" in found and not self.empty():
            raise ValueError(f"[{op}] left_padding is given, expected it before the first tokens.")
        if any(found.get("right_padding", ())) and lengths is None:
            raise ValueError(f"[{op}] right_padding is given without lengths, expected both.")
        self._table.free = 0
        more = found.get("left_padding", [0] * count)
        last = found.get("lengths", [own for _, own in self._padding])
        both = zip(self._padding, more, last, strict=True)
        self._padding = [(left + new, own) for (left, _), new, own in both]

    def finalize(self) -> None:
        """End the right padding that ``prepare`` announced."""
        self._padding = [(left, None) for left, _ in self._padding]

    def _join(self, caches: Sequence[H2OKVCache]) -> None:
        """Hold the sequences of ``caches``; rows stay shared if all share the same ones."""
        for one in caches:
            one.flush()
        self.unequal_budgets = any(one.unequal_budgets for one in caches)
        padding = [each for one in caches for each in one._padding]
        tables = [one._table for one in caches]
        if len({table.prefix for table in tables if table.tokens}) > 1:
            tables = [table.whole for table in tables]
        self._hold(join(tables), padding)

    def extend(self, other: BatchH2OKVCache) -> None:
        """Add the sequences of another batch after these.

        Raises ValueError for a cache of another kind or with other settings.
        """
        op = "[BatchH2OKVCache.extend]"
        if not isinstance(other, BatchH2OKVCache):
            raise ValueError(f"{op} found a {type(other).__name__}, expected a BatchH2OKVCache.")
        checks.check_alike(op, [self, other])
        self._join([self, other])

    def extract(self, index: int) -> H2OKVCache:
        """The cache of one sequence, in arrays of its own.

        Raises ValueError where there is no such sequence.
        """
        return self._another(self.config, self._some(self._indices("extract", [index])))

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep only some sequences, in the order given; none is allowed."""
        keep = self._indices("filter", batch_indices)
        if keep != [*range(len(self._padding))]:  # mlx_lm often keeps all
            self._hold(self._some(keep), [self._padding[index] for index in keep])

    def _indices(self, operation: str, given: Any) -> list[int]:
        if (found := checks.whole_numbers(given, most := len(self._padding) - 1)) is None:
            said = f"found the indices {given}, expected 0 to {most}."
            raise ValueError(f"[BatchH2OKVCache.{operation}] {said}")
        return found

    def _some(self, indices: Sequence[int]) -> Table:
        """The rows of these sequences, in arrays of their own."""
        self.flush()
        seen = [self._table.tokens[index] for index in indices]
        return select(self._table, indices) if any(seen) else Table([], seen)


def evicting_cache(config: H2OConfig, *, name: str = "") -> H2OKVCache:
    """An empty cache of the class that ``config`` asks for."""
    cls = H2OKVCache if config.kv_bits is None else QuantizedH2OKVCache
    return cls(config, name=name)
