"""Attention over the rows of one layer: the output, and what the policy takes in of the scores."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any, cast

import mlx.core as mx

from ..config import H2OConfig
from ..operations import prefill
from ..operations.backends import resolve
from ..operations.segments import Rows, biased_attention, masking, merged_attention
from ..policies import Policy, scoring
from .attention import segments_of, settings_of
from .checks import check_seen
from .frame import share_of_rows
from .handed_out import HandedOut
from .stored import IMPORTANCE, StoredRows
from .table import Table
from .torn import changes

_ALL = slice(None)

_Taken = tuple[mx.array, slice, Any]
"""Importance, and the lines and slots that it is of."""


class ScoredRows(StoredRows):
    """Stored rows that attention reads; :class:`H2OKVCache` says when rows come and go.

    With speculation, what the newest queries say waits beside the rows as long as they may go back.
    """

    config: H2OConfig
    policy: Policy
    _reach: int
    """``config.reach``."""
    _handed: HandedOut
    _unscored: bool
    """The last update still waits for its scores."""
    _length: int
    """Tokens of the last update."""
    _spans: list[tuple[int, int]]
    """Which of its tokens are each line's own, where some are padding."""
    _waiting: list[tuple[int, int, str]]
    """Position and number of queries whose scores wait, and the array beside the rows."""

    @property
    def in_segments(self) -> bool:
        """Whether attention reads the rows in parts; the arrays handed out then serve others."""
        if self._prefix is not None:
            return True
        return self._table is not None and len(self._table.segments) > 1

    @property
    def attention_settings(self) -> dict[str, Any]:
        """What operations on the packed rows handed out must be told of them."""
        if self._table is None:
            return {}
        tail = self._table.tail
        # The values of latent attention are the keys.
        values = tail.keys if self.config.kv_handed == "latents" else tail.values
        return settings_of(tail.keys, values, self.config.sparse_v)

    def attend(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention over the rows of the last update, whose scores the policy takes in.

        As ``fast.scaled_dot_product_attention_with_scores`` followed by ``update_scores``, but
        where the policy allows it in one operation that need not store the scores. Evaluating
        the output evaluates both. At most 128 queries.

        Raises:
            ValueError: no rows yet, keys that are not the stored rows, or as the operation.
        """
        stored = keys[0] if isinstance(keys, tuple) else keys
        table, known = self._table, self._handed.rows
        if table is None or known is None or known[0] is not keys:
            table = check_seen("attend", stored, 2, table)
        own = stored.shape[1] == table.shape[1]
        frame = table.frame
        if frame is None or not (isinstance(keys, tuple) or (own and self._handed.newest)):
            return self._attend(table, own, queries, keys, values, scale, mask, sinks)[0]
        # In the frame of the rows: logits lack a shift, and the output is turned back in the end.
        shift, policy = None, self.policy
        if sinks is not None or (policy.needs_scores and not policy.needs_weights):
            shift = frame.shift(queries, scale)
        asked = frame.query(queries)
        out, lse = self._attend(table, own, asked, keys, values, scale, mask, sinks, shift)
        out = frame.output(out)
        return out if sinks is None else share_of_rows(out, cast(mx.array, lse), sinks)

    def _attend(
        self,
        table: Table,
        own: bool,
        queries: mx.array,
        keys: Any,
        values: Any,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
        shift: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """Attention over rows as they are kept, and the lse where there are a shift and sinks.

        Args:
            table: the rows.
            own: whether the keys are those of the table, and not spread over further heads.
            shift: what the logits lack, float32 [B, Hq, L, 1]; scores and lse are with it. The
                output and the lse are then without ``sinks``, and the weights of policies with.
        """
        policy, framed = self.policy, shift is not None
        bias = self.row_bias if own else self._biases(keys)
        wants_lse, beside = framed and sinks is not None, None if framed else sinks
        at_once = not framed or (mask is None and sinks is None)
        in_order = own and not (self.in_segments or self._spans or self._reach)
        if policy.kind and in_order and at_once:
            causal, shown = masking(mask)
            shown = shift if framed else shown  # the same for all rows of a query
            out, table.beside[IMPORTANCE] = resolve().attention_and_accumulate(
                queries, keys, values, self._importance(table), scale=scale, decay=policy.decay,
                causal=causal, mask=shown, sinks=sinks, row_bias=bias, **self.attention_settings,
            )  # fmt: skip
            self._unscored = False
            return out, None
        newest = self._handed.newest
        if newest is not None and own:
            segments = segments_of(table, newest, self.config.sparse_v)
        else:
            segments = [Rows(keys, values, self.attention_settings)]
        wanted, prefix = self.policy.needs_scores, self._prefix
        out, scores, lse, *_ = merged_attention(
            segments, queries, scale=scale, mask=mask, sinks=beside, return_scores=wanted,
            return_lse=wants_lse, row_bias=bias,
            shared=None if prefix is None else prefix.as_rows(framed=isinstance(keys, tuple)),
        )  # fmt: skip
        lse = _shifted(lse, shift)
        if not wanted:
            self.attended()
            return out, lse
        total = lse
        if shift is not None:
            scores = cast(mx.array, scores) + shift
            if sinks is not None:
                total = mx.logaddexp(cast(mx.array, lse), sinks.astype(mx.float32)[:, None])
        self.update_scores(cast(mx.array, scores), lse=total, masked=mask is not None)
        tied: mx.array = mx.depends(out, list(table.beside.values()))
        return tied, lse

    def attend_chunk(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As ``attend``, for any number of queries, over the shared rows and its own, put together
        for as long as that takes: by MLX's own attention, unless rows have been folded.

        Raises ValueError as ``attend``.
        """
        check_seen("attend_chunk", keys, 2, self._table)
        bias, both, others, seen = self._biases(keys), keys, values, mask
        if self._prefix is not None:
            both, others, seen = self._prefix.before(keys, values, mask)
            bias = None if bias is None else self._prefix.beside(bias, 0.0)
        if bias is None:
            out = mx.fast.scaled_dot_product_attention(
                queries, both, others, scale=scale, mask=seen, sinks=sinks
            )
        else:
            out = biased_attention(queries, both, others, bias, scale=scale, mask=seen, sinks=sinks)
        if not self.policy.needs_scores:
            self.attended()
            return out
        self.score_chunk(queries, keys, scale=scale, mask=mask, sinks=sinks)
        tied: mx.array = mx.depends(out, list(cast(Table, self._table).beside.values()))
        return tied

    def attended(self) -> None:
        """Say that attention of ours has read the last update, which a policy that folds wants."""
        self._unscored = self._unscored and self.policy.needs_scores

    def update_scores(
        self, scores: mx.array, *, lse: mx.array | None = None, masked: bool = True
    ) -> None:
        """Take in the scores of the attention that followed an update.

        Layers that share their keys may call this several times for one update; each call counts
        as further queries. Policies that need no scores ignore it.

        Args:
            scores: float32 [B, Hq, L, N], logits before the softmax, -inf where masked, the
                queries in order, N the rows stored. Most policies count the last 128 queries only.
            lse: float32 [B, Hq, L], where the policy wants weights, ``exp(scores - lse)``; None:
                of these scores, which is right for attention without sinks.
            masked: False promises that no score is -inf, which saves work.

        Raises:
            ValueError: no rows yet, or another shape or dtype.
        """
        table = check_seen("update_scores", scores, 3, self._table)
        if not self.policy.needs_scores:
            return
        given = scoring.seen(self.policy, scores, lse)
        last = min(self._reach, given.shape[2])
        taken: list[_Taken] = []
        for one, own, slots, old, places in self._lines(table, given.shape[2], last):
            some = given if slots is None else given[one, :, own][..., slots]
            new = scoring.fold(self.policy, old, some, places, masked=masked or bool(self._spans))
            taken.append((new, one, slots))
        self._take_all(table, taken, given[:, :, given.shape[2] - last :])

    def score_chunk(
        self,
        queries: mx.array,
        keys: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> None:
        """Take in the scores of a long chunk, which its attention did not return.

        As ``update_scores`` with the scores of the queries that the policy counts; where it allows
        it they are computed in blocks, so that they are never in memory all at once.

        Raises:
            ValueError: no rows yet, keys that are not the stored rows, or as ``prefill_scores``.
        """
        table, length = check_seen("attend", keys, 2, self._table), queries.shape[2]
        last = min(self._reach, length)
        taken: list[_Taken] = []
        for one, own, slots, old, places in self._lines(table, length, last):
            seen = mask
            if isinstance(mask, mx.array) and slots is not None:
                heads = (mask.shape[-3:-2] or (1,))[0]
                seen = mx.broadcast_to(mask, (queries.shape[0], heads, length, table.shown))
                seen = seen[one, :, own][..., slots]
            rows = keys if slots is None else keys[one, :, slots]
            bias = self._biases(keys)
            if bias is not None and slots is not None:
                bias = bias[one, :, slots]
            prefix = self._prefix if self.policy.needs_weights else None
            if prefix is not None:  # weights are of the softmax over all rows
                rows, _, seen = prefix.before(rows, rows, seen)
                old = prefix.beside(old, mx.nan)
                bias = None if bias is None else prefix.beside(bias, 0.0)
                places = None if places is None else prefix.positions(places)
            new = scoring.chunk_seen(
                self.policy, old, places, queries[one, :, own], rows,
                scale=scale, mask=seen, sinks=sinks, row_bias=bias,
            )  # fmt: skip
            taken.append((new if prefix is None else new[:, :, prefix.rows :], one, slots))
        given = None
        if last:
            found = prefill.last_scores(
                queries, keys, scale=scale, mask=mask, row_bias=self._biases(keys), queries=last
            )
            given = scoring.seen(self.policy, found, None, sinks)
        self._take_all(table, taken, given)

    def reset_scores(self) -> None:
        """Forget what was accumulated for every row, as if none had been scored yet."""
        table = self._table
        if table is not None and self.policy.needs_scores:
            table.attach(IMPORTANCE, mx.zeros((*table.shape, 0)), mx.nan)
        self._cut_waiting(end=0)

    def _biases(self, keys: mx.array) -> mx.array | None:
        """Those of as many rows and heads, float32 [B, H, N]; None where none has been folded."""
        bias, (_, heads, rows, *_) = self.row_bias, keys.shape
        if bias is None or bias.shape[1:] == (heads, rows):
            return bias
        return mx.repeat(bias[:, :, :rows], heads // bias.shape[1], axis=1)

    def _importance(self, table: Table) -> mx.array:
        """That of all rows that there is room for, [B, H, slots]."""
        if IMPORTANCE not in table.beside:
            table.attach(IMPORTANCE, mx.zeros((*table.shape, 0)), mx.nan)
        return table.beside[IMPORTANCE]

    @changes
    def _take_all(self, table: Table, taken: list[_Taken], waiting: mx.array | None) -> None:
        """What each line's rows have now, and what the newest queries say, which may go back."""
        for new, one, slots in taken:
            self._take_in(table, new, one, slots)
        if waiting is not None and waiting.shape[2]:
            self._keep_waiting(table, waiting, self._tokens[0] - waiting.shape[2])
        self._unscored = False

    def _take_in(
        self, table: Table, importance: mx.array, one: slice = _ALL, slots: Any = None
    ) -> None:
        """That of the rows at ``slots``, None: of the first ones, is now this."""
        if table.beside[IMPORTANCE].shape == importance.shape:
            table.beside[IMPORTANCE] = importance
        else:
            slots = slice(importance.shape[2]) if slots is None else slots
            table.beside[IMPORTANCE][one, :, slots] = importance
        self._unscored = False

    def _lines(
        self, table: Table, length: int, last: int
    ) -> Iterator[tuple[slice, slice, Any, mx.array, mx.array | None]]:
        """Lines, which of the queries but the ``last`` ones are their own, the slots that these
        see, None: all, and the importance and positions there, where the policy wants them.

        All lines at once, unless some were given padding.
        """
        places = table.positions(self._tokens) if self.policy.needs_positions else None
        seen = self._importance(table), places
        for line, (start, stop) in enumerate(self._spans):
            if stop > start:
                one, slots = slice(line, line + 1), table.slots_of(line)
                old, places = (a if a is None else a[one, :, slots] for a in seen)
                yield one, slice(start, stop), slots, cast(mx.array, old), places
        if not self._spans and last < length:
            count = table.width - last  # the rows of the last queries are the last
            old, places = (a if a is None else a[:, :, :count] for a in seen)
            own = slice(length - last)
            yield _ALL, own, slice(count) if last else None, cast(mx.array, old), places

    # Speculation: what queries say that may be taken back

    def _keep_waiting(self, table: Table, given: mx.array, start: int) -> None:
        """Keep what queries from ``start`` on say, ``given`` [B, Hq, L, N], beside the rows."""
        batch, _, count, width = given.shape
        rows = given.reshape(batch, table.shape[1], -1, count, width).transpose(0, 1, 4, 3, 2)
        free = (f"waiting {place}" for place in itertools.count())
        name = next(name for name in free if name not in table.beside)
        rows = rows.reshape(batch, table.shape[1], width, -1)
        table.attach(name, rows, scoring.unseen(self.policy))
        self._waiting = [*self._waiting, (start, count, name)]

    def _given(self, table: Table, count: int, name: str) -> mx.array:
        """What ``count`` queries said, as the policy takes it, [B, Hq, count, N]."""
        rows = table.beside[name][:, :, : table.width]
        batch, heads, width, _ = rows.shape
        rows = rows.reshape(batch, heads, width, count, -1).transpose(0, 1, 4, 3, 2)
        return rows.reshape(batch, -1, count, width)

    def _settle_waiting(self, border: int) -> None:
        """Take in what queries before the position ``border`` say."""
        table = cast(Table, self._table)
        for start, count, name in self._waiting:
            if start < border:
                rows = table.width - (self._tokens[0] - min(border, start + count))  # then there
                given = self._given(table, count, name)[:, :, : border - start, :rows]
                old = self._importance(table)[:, :, :rows]
                positions = table.positions(self._tokens)[:, :, :rows]
                self._take_in(table, scoring.fold(self.policy, old, given, positions))
        self._cut_waiting(first=border)

    def _cut_waiting(self, first: int = 0, end: int = sys.maxsize) -> None:
        """Forget what queries before the position ``first`` and from ``end`` on said."""
        left = []
        table = cast(Table, self._table)
        for start, count, name in self._waiting:
            skipped, stop = max(0, first - start), min(count, end - start)
            if skipped >= stop:
                del table.beside[name], table.fills[name]
                continue
            if stop - skipped < count:
                group = table.beside[name].shape[3] // count
                cut = slice(skipped * group, stop * group)
                table.beside[name] = table.beside[name][..., cut]
            left.append((start + skipped, stop - skipped, name))
        self._waiting = left

    def _waiting_state(self) -> tuple[mx.array | None, str]:
        """What waits, [B, Hq, queries, N], and the positions and numbers of these queries."""
        given = [self._given(cast(Table, self._table), *one[1:]) for one in self._waiting]
        numbers = json.dumps([one[:2] for one in self._waiting])
        return mx.concatenate(given, axis=2) if given else None, numbers

    def _restore_waiting(self, given: mx.array | None, numbers: str, ends: bool = False) -> None:
        """Have what ``_waiting_state`` gave; or ``ends`` of the queries in the place of numbers."""
        if given is None or self._table is None:
            return
        first = 0
        for start, count in json.loads(numbers):
            count = count - start if ends else count
            self._keep_waiting(self._table, given[:, :, first : first + count], start)
            first += count


def _shifted(lse: mx.array | None, shift: mx.array | None) -> mx.array | None:
    """What is [B, Hq, L] of logits, of logits with a shift [B, Hq, L, 1]."""
    return lse if lse is None or shift is None else lse + shift.squeeze(-1)
