"""Snapshots: caches of prompt prefixes, found by their tokens.

A cache that has evicted nothing can be trimmed to any shorter prefix, unless later tokens have
ranked its rows. Other caches cannot be trimmed, but are bounded and therefore small: a prompt
leaves several of them, at a ladder of places (:func:`places`).
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from ..lm.outline import total_bytes
from ..lm.ranks import ALONE, Ranks
from ..lm.routing import evicting_caches, held_tokens, parts_of
from .kept import Entry, Kept, key_of

LEAST = 32  # tokens between two places at least
SHORT = 160  # up to so many tokens, reading a message again costs no more than its places
MOST = 48  # places of one prompt at most


class Snapshots(Kept[list[Any]]):
    """Snapshots, bounded in bytes and number; the least recently used one goes first.

    All ``ranks`` keep and find the same ones, and count the bytes of the rank that has most.
    """

    def __init__(self, max_bytes: int, max_count: int = 1024, ranks: Ranks = ALONE) -> None:
        super().__init__(max_count)
        self.max_bytes, self.ranks = max_bytes, ranks

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int]:
        """Copies of the caches of the longest prefix of ``tokens`` that is kept, and its length,
        which is less than ``len(tokens)``; ([], 0) if there are none."""
        length, found = self.best(key_of(tokens))
        if found is None:
            return [], 0
        self.use(found.key)
        caches = copy.deepcopy(found.content)
        return (caches, length) if trim_to(caches, length) else ([], 0)

    def keep(self, tokens: Sequence[int], caches: list[Any]) -> int:
        """Keep caches, which nobody may change from here on; returns how many of the ``tokens``
        they hold, which is 0 if they cannot be kept."""
        for cache in evicting_caches(caches):
            cache.flush()
        held, able = min([len(tokens), *held_tokens(caches)]), is_cuttable(caches)
        cuttable, whole, less = self.ranks.least(able, trim_to(caches, held), -total_bytes(caches))
        if not whole or held == 0:
            return 0
        new = Entry(key_of(tokens[:held]), -less, caches, bool(cuttable))
        if new.nbytes <= self.max_bytes and self.whole(new.key) is None:
            mx.eval([cache.state for cache in caches])
            self.put(new)
            self.shrink(self.max_bytes)
        return held


def places(
    tokens: Sequence[int], boundaries: frozenset[int], start: int, lasting: int
) -> list[int]:
    """Where to take snapshots while ``tokens`` are prefilled: before tokens that begin or end a
    message, at doubling distances before each of these if there are more than SHORT tokens, and
    always before the last one.

    Args:
        boundaries: the tokens that stand between messages.
        start: how many tokens are in the caches already.
        lasting: up to this many tokens nothing is evicted, so that one snapshot there serves all
            shorter prefixes.
    """
    last = len(tokens) - 1
    if len(tokens) <= lasting:
        return [last] if start < last else []
    ends = [n for n, token in enumerate(tokens) if 0 < n < last and token in boundaries]
    found, before = {last}, 0
    for end in [*ends, last]:
        if end - before < LEAST and end != last:
            continue
        step = LEAST
        while len(tokens) > SHORT and end - step >= before + LEAST:
            found.add(end - step)
            step *= 2
        found.add(end)
        before = end
    found -= set(sorted(place for place in found if place <= lasting)[:-1])
    return sorted(place for place in found if place > start)[-MOST:]


def is_cuttable(caches: Sequence[Any]) -> bool:
    """Whether caches can be trimmed to any prefix: none has evicted a row, and later tokens have
    not ranked rows by scores, nor stored some with fewer bits."""
    ranked = (one for one in evicting_caches(caches) if one.config.max_kv_size is not None)
    return not any(one.policy.needs_scores or one.config.light_bits for one in ranked) and all(
        one.is_trimmable() and not (getattr(one, "evicted", 0) or getattr(one, "start_position", 0))
        for one in parts_of(caches)
    )


def trim_to(caches: Sequence[Any], length: int) -> bool:
    """Trim caches to this many tokens; False if they cannot be trimmed."""
    surplus = [max(held_tokens([one]), default=length) - length for one in caches]
    if any(surplus) and all(one.is_trimmable() for one in caches):
        with suppress(ValueError):  # some caches can trim a few tokens only
            for one, tokens in zip(caches, surplus, strict=True):
                one.trim(tokens)
            return True
    return not any(surplus)
