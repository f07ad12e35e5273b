"""Events that happen to a cache and to the slow reference: after each event the two must agree.

A course has one cache, and one reference for each sequence. It changes the cache only through its
public interface.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from cache_columns import COLUMNS, check_mixed, new_cache, packings, rounded, stored_rows
from cache_folded import take_folded
from cache_invariants import check_invariants
from cache_sequences import HEADS, Sequence
from mlx_h2o import H2OConfig, H2OKVCache, load_prompt_cache, save_prompt_cache
from reference_cache import ReferenceCache

SCALE = 0.25

__all__ = ["HEADS", "SCALE", "SMALL", "Course", "Sequence"]

BY_ROWS = ("keydiff", "value-aware", "mix", "h2o")
"""Policies that rank rows by their stored keys or values."""

SMALL = {"max_kv_size": 14, "sink_size": 2, "recent_size": 5}


class Course:
    """A cache of ``batch`` sequences, and the events that happen to it.

    ``batch`` None: one sequence in a cache of its own; a number with ``equal``: that many sequences
    of equal length in one cache; else a merged batch whose sequences may have any length.
    """

    def __init__(
        self, column: str = "dense", policy: str = "h2o-ema", batch: int | None = None, *,
        equal: bool = False, seed: int = 0, **settings: Any,
    ) -> None:  # fmt: skip
        self.column = COLUMNS[column]
        given = SMALL | {"policy": policy} | self.column.settings | settings
        self._begin(H2OConfig.of(**given), batch, batch is not None and not equal, seed)

    def _begin(self, config: H2OConfig, batch: int | None, ragged: bool, seed: int) -> None:
        self.config, self.ragged = config, ragged
        self.sequences = [Sequence(self.config, 97 * seed + i) for i in range(batch or 1)]
        self.windows = [0] * len(self.sequences)  # where protected rows begin
        self.coming = [0] * len(self.sequences)  # padding on the left
        self.followed = 0  # close folds, followed from the cache
        self.cache: Any = new_cache(self.config)
        if self.ragged:
            self.cache = H2OKVCache.merge([new_cache(self.config) for _ in self.sequences])

    def new(self, batch: int, seed: int) -> Course:
        """A merged batch of other sequences with the same settings."""
        found = copy.copy(self)
        found._begin(self.config, batch, True, seed)
        return found

    @property
    def references(self) -> list[ReferenceCache]:
        return [sequence.reference for sequence in self.sequences]

    @property
    def shareable(self) -> int:
        """How many first rows of a sequence can be shared."""
        config, cache = self.config, self.cache
        changing = config.light_bits or self.column.latents
        several = len(self.sequences) > 1 and not self.ragged
        if changing or several or config.speculative or cache.prefix_rows:
            return 0
        return min(config.prefix_size, *(one.size for one in self.references), 99)

    @property
    def bits(self) -> tuple[Any, Any]:
        """Bits of keys and of values; None: dense."""
        keys, values = packings(self.config)
        return keys, None if self.column.latents else values

    # Events

    def tokens(self, count: int) -> None:
        """Add tokens one by one."""
        for _ in range(count):
            self.chunk(1)

    def chunk(self, length: int, drafts: int = 0) -> None:
        """Add ``length`` tokens of every sequence in one update."""
        parts = [sequence.next(length, drafts) for sequence in self.sequences]
        self._forward(parts, [(0, length + drafts)] * len(parts))

    def prompts(self, lengths: list[int], *, step: int = 64, left: bool = False) -> None:
        """Add a prompt for each sequence, padded to the longest, in steps, as mlx_lm does."""
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        if left:
            self.cache.prepare(left_padding=padding)
            self.coming = padding
        elif any(padding):
            self.cache.prepare(lengths=lengths, right_padding=padding)
        fed = []
        for sequence, length, pad in zip(self.sequences, lengths, padding, strict=True):
            both = [sequence.next(length), sequence.random(pad)]
            if left:
                both.reverse()
            fed.append([np.concatenate(parts, axis=1) for parts in zip(*both, strict=True)])
        for first in range(0, longest, step):
            end = min(first + step, longest)
            spans = []
            for length, pad in zip(lengths, padding, strict=True):
                low, high = (pad, longest) if left else (0, length)
                spans.append(tuple(min(max(edge, first), end) - first for edge in (low, high)))
            self._forward([[a[:, first:end] for a in arrays] for arrays in fed], spans)
        if any(padding) and not left:
            self.cache.finalize()
            self.check()

    def draft(self, accepted: int, rejected: int, *, at_once: bool = True) -> None:
        """Add draft tokens, the first of which are accepted, and take the others back."""
        if at_once:
            self.chunk(accepted, rejected)
        else:
            self.tokens(accepted)
            for _ in range(rejected):
                self.chunk(0, 1)
        self.trim(rejected)

    def trim(self, count: int) -> None:
        assert self.cache.is_trimmable()
        assert self.cache.trim(count) == count
        for reference in self.references:
            reference.trim(count)
        self.check()

    def flush(self) -> None:
        self.cache.flush()
        self._rest()
        self.check()

    @property
    def surplus(self) -> bool:
        """Whether the references hold rows of a chunk beyond the budget."""
        return any(reference.surplus for reference in self.references)

    @property
    def held(self) -> int:
        """Rows per head, read without making the cache evict anything."""
        return max(self.cache._table.lengths, default=0) + self.cache.prefix_rows

    def filter(self, indices: list[int]) -> None:
        """Keep only these sequences, in this order."""
        self.flush()
        self.cache.filter(indices)
        self.sequences = [self.sequences[index] for index in indices]
        self.windows = [self.windows[index] for index in indices]
        self.coming = [0] * len(indices)
        self.check()

    def share(self, rows: int, count: int) -> Course:
        """A batch of ``count`` sequences that share their first rows: this one, and others that
        continue differently."""
        self.flush()
        alone = copy.deepcopy(self.cache)
        alone.share(rows)
        batch = H2OKVCache.merge([copy.deepcopy(alone) for _ in range(count)])
        found = self._continued(batch, [0] * count, ragged=True)
        for number, sequence in enumerate(found.sequences):
            sequence.packed = sequence.reference.offset
            if number:
                sequence.goes_on_differently(number)
        assert found.cache.prefix_rows == rows
        found.check()
        return found

    def extend(self, other: Course) -> None:
        """Add the sequences of another course."""
        self.flush()
        other.flush()
        self.cache.extend(other.cache)
        self.sequences += other.sequences
        self.windows += other.windows
        self.coming += other.coming
        self.check()

    def extract(self, index: int) -> Course:
        """A course of its own for one sequence, which also stays in this one."""
        self.flush()
        found = self._continued(self.cache.extract(index), [index], ragged=False)
        found.check()
        return found

    def merged(self, order: list[int]) -> Course:
        """A course with a new batch, merged from these sequences after extracting each."""
        self.flush()
        batch = H2OKVCache.merge([self.cache.extract(index) for index in order])
        found = self._continued(batch, order, ragged=self.ragged)
        found.check()
        return found

    def _continued(self, cache: Any, order: list[int], *, ragged: bool) -> Course:
        """A course with this cache, which holds copies of these sequences."""
        found = copy.copy(self)
        found.cache, found.ragged = cache, ragged
        found.sequences = [copy.deepcopy(self.sequences[index]) for index in order]
        found.windows = [self.windows[index] for index in order]
        found.coming = [0] * len(order)
        return found

    def copied(self, how: str = "copy") -> Course:
        """A course that continues with a copy of the cache, with its state in another object, or
        with the cache loaded from a file."""
        self.flush()
        found = copy.copy(self)
        found.sequences = copy.deepcopy(self.sequences)
        if how == "copy":
            found.cache = copy.deepcopy(self.cache)
        elif how == "file":
            with tempfile.TemporaryDirectory() as folder:
                save_prompt_cache(Path(folder) / "cache", [self.cache])
                (found.cache,) = load_prompt_cache(Path(folder) / "cache")
                mx.eval(found.cache.state)  # while the file exists
        else:
            found.cache = type(self.cache).from_state(self.cache.state)
        assert type(found.cache) is type(self.cache)
        found.config = found.cache.config
        assert found.config == self.config or (how != "copy" and self.config.preallocate)
        found.check()
        return found

    def under(self, policy: str) -> Course:
        """A course that continues with the same rows under another policy."""
        found = self.copied()
        state = list(found.cache.state)
        place = -2 if found.cache.prefix_rows else -1
        state[place] = json.dumps(json.loads(state[place]) | {"policy": policy})
        found.cache = type(self.cache).from_state(tuple(state))
        found.config = H2OConfig.of(
            **self.config.named() | {"policy": policy, "preallocate": False}
        )
        assert found.cache.config == found.config
        for reference in found.references:
            reference.take_policy(found.config, found.cache.policy.needs_scores)
        found.check()
        return found

    # What both sides do at an event, and whether they agree

    def _forward(self, parts: list[list[np.ndarray]], spans: list[tuple[int, int]]) -> None:
        """One forward pass of a layer; ``spans`` says which tokens are a sequence's own."""
        cache = self.cache
        if self.config.folds or (self.column.mixed and self.config.policy.name in BY_ROWS):
            self.flush()  # else rows are folded or packed between two evictions of one update
        queries, keys, values = (np.stack(arrays) for arrays in zip(*parts, strict=True))
        length = queries.shape[2]
        mask = cache.make_mask(length)
        k, v = cache.update_and_fetch(mx.array(keys), mx.array(values))
        v = k if self.column.latents else v
        self.coming = [n - start for n, (start, _) in zip(self.coming, spans, strict=True)]
        for b, (start, stop) in enumerate(spans):
            own = [keys[b, :, start:stop], values[b, :, start:stop]]
            self.sequences[b].takes(own)
            if not self.column.mixed:
                packing = zip(own, self.bits, self.sequences[b].centres, strict=True)
                own = [rounded(*each) for each in packing]
            if stop > start:
                self.references[b].update(*own)
            else:
                self.references[b].flush()
        in_chunk = length if length > max(1, self.config.reach) else 0
        assert self.held <= max(one.budget for one in self.references) + in_chunk
        self._take_rows()
        out = cache.attend(mx.array(queries), k, v, scale=SCALE, mask=mask)
        assert np.isfinite(np.array(out)).all()
        for b, (start, stop) in enumerate(spans):
            if stop > start:
                came = [a[b, :, start:stop] for a in (keys, values) if isinstance(v, mx.array)]
                expected = self.references[b].attend(queries[b, :, start:stop], SCALE, *came)
                if not self.column.latents:
                    found = np.array(out[b, :, start:stop])
                    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-5)
        if not (self.surplus and self.references[0].offset % 2):  # else the next update evicts it
            self.check(newest=[stop - start for start, stop in spans])

    def _rest(self) -> None:
        """Let the references evict as the cache has done when its bytes were read."""
        for reference in self.references:
            reference.flush()
        self._take_rows()

    def _take_rows(self) -> None:
        """Let the references continue with the cache's own rows where these were packed again
        (mixed precision) or folded."""
        if self.config.folds and self.held:
            self.followed += take_folded(self.cache, self.references)
        if not self.column.mixed or self.held == 0:
            return
        positions = np.array(self.cache.positions)
        keys, values = stored_rows(self.cache)
        for b, reference in enumerate(self.references):
            for h, rows in enumerate(reference.heads):
                slots = {int(p): slot for slot, p in enumerate(positions[b, h])}
                for row in rows:
                    if row.position in slots:
                        slot = slots[row.position]
                        row.key, row.value = keys[b, h, slot], values[b, h, slot]

    def check(self, newest: list[int] | None = None) -> None:
        """Check rows, scores, offsets and counts against the references, and the invariants."""
        cache, references, surplus = self.cache, self.references, self.surplus
        table = cache._table
        cache.size()  # this evicts the surplus
        if surplus or cache._table is not table:
            self._rest()
            newest = None  # rows have moved
        offsets = [reference.offset for reference in references]
        places = [seen - n for seen, n in zip(offsets, self.coming, strict=True)]
        assert np.array(cache.offset).reshape(-1).tolist() == places[: None if self.ragged else 1]
        self.windows = [
            max(before, offset - reference.recent)
            for before, offset, reference in zip(self.windows, offsets, references, strict=True)
        ]
        check_invariants(cache, newest=newest, window=self.windows, offsets=offsets)
        if cache.empty():
            assert not any(offsets)
            return
        evicted = [reference.evicted for reference in references]
        assert cache.evicted == sum(evicted[: None if self.ragged else 1])
        assert cache.size() == max(reference.size for reference in references)
        positions, scores = np.array(cache.positions), np.array(cache.scores)
        keys, values = stored_rows(cache)
        for b, sequence in enumerate(self.sequences):
            for h, rows in enumerate(sequence.reference.heads):
                slots = np.argsort(positions[b, h])
                slots = slots[positions[b, h, slots] >= 0]
                where = f"sequence {b}, head {h}"
                assert positions[b, h, slots].tolist() == [row.position for row in rows], where
                if cache.policy.needs_scores:
                    self._check_scores(sequence.reference, rows, scores[b, h, slots], where)
                self._check_rows(b, h, (keys[b, h, slots], values[b, h, slots]))

    def _check_scores(self, reference, rows, found: np.ndarray, where: str) -> None:
        """Check scores of evictable rows out of reach of trims; shared rows have no scores."""
        first = 0 if self.config.light_bits else self.config.prefix_size
        final = [first <= row.position < reference.offset - reference.tail for row in rows]
        expected = np.array([row.score for row in rows])[final]
        np.testing.assert_allclose(found[final], expected, rtol=3e-4, atol=1e-5, err_msg=where)

    def _check_rows(self, b: int, head: int, found: tuple[np.ndarray, np.ndarray]) -> None:
        sequence = self.sequences[b]
        newest = self.windows[b] + sequence.reference.recent
        rows = sequence.reference.heads[head]
        if not self.column.mixed:
            expected = [row.key for row in rows], [row.value for row in rows]
            for part in range(2 if rows else 0):
                np.testing.assert_array_equal(found[part], np.array(expected[part]))
            return
        for at, row in enumerate(rows):
            for part in range(2):
                came = sequence.came[part][head, row.position]
                dense = row.position >= max(newest - self.config.dense_rows, sequence.packed)
                coarsest = self.config.light_bits or self.bits[part]
                centre = sequence.centres[part][head]
                check_mixed(found[part][at], came, dense, coarsest, centre)
