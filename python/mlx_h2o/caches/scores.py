"""The scores of attention, as a policy accumulates them beside the rows of a table.

With speculation, scores of the newest queries stay pending while these may be taken back.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..config import H2OConfig
from ..operations import composed
from ..operations.backends import resolve
from ..operations.composed import accumulating, prefill
from ..operations.requests import attention_request, last_queries
from ..policies import Policy
from .step import Step
from .table import BIAS, IMPORTANCE, WAITING, Table
from .views import behind_shared

AttentionCall = tuple[mx.array, Any, Any, float, mx.array | str | None, mx.array | None]
"""Queries, the keys and values that a table handed out, the scale, the mask and sinks."""


class Part(NamedTuple):
    """Some sequences, their queries without padding, and the slots these see (None: all)."""

    sequences: slice
    queries: slice
    slots: Any

    def of(self, array: Any) -> Any:
        """The elements of these rows in ``array`` [B, H, N]."""
        if array is None or self.slots is None:
            return array
        return array[self.sequences, :, self.slots]


def _parts(table: Table, step: Step, length: int, last: int) -> list[Part]:
    """``length`` queries without the ``last`` ones, which may be taken back: of all sequences at
    once, or one by one if there is padding."""
    if step.spans:
        return [
            Part(slice(n, n + 1), slice(start, stop), table.slots_of(n))
            for n, (start, stop) in enumerate(step.spans)
            if stop > start
        ]
    # Leave out the last queries and their rows.
    slots = slice(table.width - last) if last else None
    return [Part(slice(None), slice(length - last), slots)] if last < length else []


def _before(policy: Policy, table: Table) -> tuple[mx.array, mx.array | None]:
    """The importance of the rows in use before a step; and their positions, if the policy needs
    them."""
    places = table.positions if policy.needs_positions else None
    return table.beside[IMPORTANCE][:, :, : table.width], places


def seen(
    policy: Policy, scores: mx.array, lse: mx.array | None, sinks: mx.array | None = None
) -> mx.array:
    """What ``accumulate`` takes: the scores, or their weights if the policy needs weights.

    Without ``lse``, the softmax is over these scores and ``sinks``. Raises ValueError for an
    ``lse`` of another shape.
    """
    if not policy.needs_weights:
        return scores
    if lse is None:
        return composed.weights(scores, sinks)
    if lse.shape != scores.shape[:3]:
        raise ValueError(
            f"[H2OKVCache.update_scores] lse has shape {lse.shape}, expected [B, Hq, L] = "
            f"{scores.shape[:3]} as the scores."
        )
    return composed.weights_of(scores, lse)


def _accumulated(
    policy: Policy, old: mx.array, given: mx.array, places: Any, masked: bool = True
) -> mx.array:
    """The importance [B, H, N] after the scores or weights ``given`` [B, Hq, L, N]."""
    if policy.chunk_queries is not None:
        given = given[:, :, -policy.chunk_queries :]
    return policy.accumulate(old, given, positions=places, masked=masked)


def of_scores(
    config: H2OConfig, table: Table, step: Step, given: mx.array, masked: bool
) -> tuple[list[tuple[Part, mx.array]], mx.array]:
    """The importance after the scores or weights ``given`` [B, Hq, L, N], by part; and the pending
    ones. Changes nothing."""
    policy, length, found = config.policy, given.shape[2], []
    last, masked = min(config.reach, length), masked or bool(step.spans)
    old, places = _before(policy, table)
    for part in _parts(table, step, length, last):
        sequences, queries, slots = part
        some = given if slots is None else given[sequences, :, queries][..., slots]
        new = _accumulated(policy, part.of(old), some, part.of(places), masked)
        found.append((part, new))
    return found, given[:, :, length - last :]


def of_chunk(
    config: H2OConfig, table: Table, step: Step, asked: AttentionCall
) -> tuple[list[tuple[Part, mx.array]], mx.array | None]:
    """As ``of_scores``, for a chunk whose attention returned no scores."""
    queries, keys, values, scale, mask, sinks = asked
    policy, length, found = config.policy, queries.shape[2], []
    last, before = min(config.reach, length), table.prefix_rows if policy.needs_weights else 0
    if before:  # the softmax is over all rows
        keys, _, mask = behind_shared(table, keys, values, mask)
        table = table.whole
    bias, every = biases(table, keys), _before(policy, table)
    for part in _parts(table, step, length, last):
        sequences, own, slots = part
        shown = mask
        if isinstance(mask, mx.array) and slots is not None:
            heads = (mask.shape[-3:-2] or (1,))[0]
            shown = mx.broadcast_to(mask, (queries.shape[0], heads, length, keys.shape[2]))
            shown = shown[sequences, :, own][..., slots]
        old, places = map(part.of, every)
        rows, beside = part.of(keys), part.of(bias)
        given: Any = {"scale": scale, "mask": shown, "row_bias": beside, "bias_masks": False}
        new = _after_chunk(policy, old, places, queries[sequences, :, own], rows, sinks, given)
        if before and slots is not None:
            part = part._replace(slots=slots[before:] - before)
        found.append((part, new[:, :, before:] if before else new))
    if not last:
        return found, None
    given = {"scale": scale, "mask": mask, "row_bias": bias, "queries": last}
    return found, seen(policy, prefill.last_scores(queries, keys, **given), None, sinks)


def _after_chunk(
    policy: Policy, old: mx.array, places: mx.array | None, queries: mx.array, keys: mx.array,
    sinks: mx.array | None, given: dict[str, Any],
) -> mx.array:  # fmt: skip
    """The importance after a chunk whose attention returned no scores.

    In blocks of keys or queries where the policy allows it, so that the scores are never in memory
    all at once.
    """
    request, operations = attention_request(queries, keys, keys, **given), resolve()
    if policy.decay is not None and keys.shape[1] == old.shape[1]:
        last = last_queries(request, accumulating.MAX_QUERIES)
        return operations.prefill_scores(last, old, policy.decay)
    if policy.chunk_queries is None:
        request.sinks = sinks
        some, times = prefill.sampled(request)
        scores = times * mx.expand_dims(operations.prefill_scores(some, None, None), 2)
    else:
        scores = prefill.last_scores(queries, keys, queries=policy.chunk_queries, **given)
        scores = seen(policy, scores, None, sinks)
    return policy.accumulate(old, scores, positions=places, masked=given["mask"] is not None)


def biases(table: Table, keys: mx.array) -> mx.array | None:
    """Row biases for the heads of these keys, float32 [B, H, at least N]; None if no row has been
    folded."""
    bias = table.beside.get(BIAS)
    if bias is None or bias.shape[1] == (heads := keys.shape[1]):
        return bias
    return mx.repeat(bias, heads // bias.shape[1], axis=1)


def store(
    policy: Policy, table: Table, found: Sequence[tuple[Part, mx.array]], waiting: Any = None
) -> None:
    """Store the new importance, and the pending scores of the newest queries, [B, Hq, L, N]."""
    for part, importance in found:
        if table.beside[IMPORTANCE].shape == importance.shape:
            table.beside[IMPORTANCE] = importance
        else:
            slots = slice(importance.shape[2]) if part.slots is None else part.slots
            table.beside[IMPORTANCE][part.sequences, :, slots] = importance
    if policy.kind is None and table.tail.ragged:  # each kind leaves unused slots unchanged or 0
        table.clear(IMPORTANCE)
    if waiting is not None and (count := waiting.shape[2]):
        wait(policy, table, waiting, [(table.tokens[0] - count, count)])
    table.unscored = False


# Speculation: pending scores of queries that may be taken back


def wait(policy: Policy, table: Table, given: mx.array, places: Sequence[tuple[int, int]]) -> None:
    """Store the pending scores ``given`` [B, Hq, L, N] beside the rows; ``places`` are the first
    position and the number of queries of each run."""
    name = WAITING[policy.needs_weights]
    (batch, heads), count, width = table.shape, *given.shape[2:]
    rows = given.reshape(batch, heads, -1, count, width).transpose(0, 1, 4, 3, 2)
    rows = rows.reshape(batch, heads, width, -1)
    if name in table.beside:
        rows = mx.concatenate([table.beside[name][:, :, :width], rows], axis=3)
    table.attach(name, rows)
    table.waiting = [*table.waiting, *places]


def waiting(policy: Policy, table: Table, first: int = 0, stop: int | None = None) -> Any:
    """Pending scores of some queries, in the form that the policy takes, [B, Hq, L, N]."""
    if not table.waiting:
        return None
    (batch, heads), count = table.shape, sum(count for _, count in table.waiting)
    rows = table.beside[WAITING[policy.needs_weights]][:, :, : table.width]
    rows = rows.reshape(batch, heads, table.width, count, -1)[:, :, :, first:stop]
    return rows.transpose(0, 1, 4, 3, 2).reshape(batch, -1, rows.shape[3], table.width)


def settle(policy: Policy, table: Table, border: int) -> None:
    """Accumulate the pending scores of queries before the position ``border``."""
    first = 0
    for start, count in table.waiting:
        if start < border:
            done = min(count, border - start)
            held = table.width - (table.tokens[0] - start - done)
            part = Part(slice(None), slice(None), slice(held))
            given = waiting(policy, table, first, first + done)[..., part.slots]  # rows held then
            old, places = map(part.of, _before(policy, table))
            store(policy, table, [(part, _accumulated(policy, old, given, places))])
        first += count
    cut(policy, table, border)


def cut(policy: Policy, table: Table, begin: int = 0, end: int = sys.maxsize) -> None:
    """Drop the pending scores of queries before the position ``begin`` and from ``end`` on."""
    left, kept, place, name = [], [], 0, WAITING[policy.needs_weights]
    for start, count in table.waiting:
        stay = range(max(0, begin - start), min(count, end - start))
        kept += [place + n for n in stay]
        left += [(start + stay[0], len(stay))] if stay else []
        place += count
    if len(kept) < place:
        array = table.beside.pop(name)
        if kept:
            run = kept[-1] - kept[0] + 1 == len(kept)
            some: Any = slice(kept[0], kept[-1] + 1) if run else mx.array(kept)
            rows = array.reshape(*array.shape[:3], place, -1)[:, :, :, some]
            table.beside[name] = rows.reshape(*array.shape[:3], -1)
    table.waiting = left
