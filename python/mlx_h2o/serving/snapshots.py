"""What was read before: caches of beginnings of prompts, found by their tokens.

A cache from which nothing was evicted is cut back to any shorter beginning, unless later tokens
have ranked its rows. Others cannot be cut, and are bounded, therefore small: several of them are
kept, at a ladder of places (:func:`places`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from ..lm.ranks import ALONE, Ranks
from ..lm.routing import evicting_caches, parts_of
from .kept import Entry, Kept, key_of

LEAST = 32  # tokens between two places
MOST = 48  # places of one prompt


class Snapshots(Kept[list[Any]]):
    """Snapshots of at most so many bytes and so many; the one used longest ago goes first.

    All ``ranks`` keep and find the same, and count the bytes of the one that has most.
    """

    def __init__(self, max_bytes: int, max_count: int = 1024, ranks: Ranks = ALONE) -> None:
        super().__init__(max_count)
        self.max_bytes, self.ranks = max_bytes, ranks

    def longest(self, tokens: Sequence[int]) -> int:
        """How many first tokens :meth:`find` would have; never all of them."""
        return self.best(key_of(tokens))[0]

    def find(self, tokens: Sequence[int]) -> tuple[list[Any], int]:
        """Caches that have seen the longest beginning of ``tokens`` there is, and its length, which
        is less than theirs; ([], 0) where there are none. The caches are the caller's."""
        length, found = self.best(key_of(tokens))
        if found is None:
            return [], 0
        self.use(found.key)
        caches = copy.deepcopy(found.content)
        return (caches, length) if _cut(caches, length) else ([], 0)

    def keep(self, tokens: Sequence[int], caches: list[Any]) -> int:
        """Keep caches, which nobody changes from here on, and return how many of the ``tokens``
        they hold: never more than they have seen."""
        for cache in evicting_caches(caches):
            cache.flush()
        held, cut = min([len(tokens), *held_tokens(caches)]), is_cuttable(caches)
        own = cut, _cut(caches, held), -sum(int(one.nbytes) for one in caches)
        cuttable, whole, less = self.ranks.least(*own)
        if not whole or held == 0:
            return 0
        key = key_of(tokens[:held])
        near = list(self.nearest(key))
        if any(one.serves(shared, held + 1) == held for shared, one in near):
            return held  # it is there
        mx.eval([cache.state for cache in caches])
        for shared, one in near if cuttable else ():
            if one.cuttable and shared == len(one):
                self.drop(one.key)
        self.put(Entry(key, -less, caches, bool(cuttable)))
        self.shrink(self.max_bytes)
        return held


def places(
    tokens: Sequence[int], boundaries: frozenset[int], start: int, lasting: int | None
) -> list[int]:
    """Where to keep caches while ``tokens`` are read: before tokens that begin or end a message,
    powers of two before each of these, and always before the last token.

    Args:
        boundaries: the tokens that stand between messages.
        start: tokens that were read before.
        lasting: tokens from which nothing is evicted, so that one place there serves all before
            it; None: all of them.
    """
    last = len(tokens) - 1
    if lasting is None or len(tokens) <= lasting:
        return [last] if start < last else []
    ends = [n for n, token in enumerate(tokens) if 0 < n < last and token in boundaries]
    found, before = {last}, 0
    for end in [*ends, last]:
        if end - before < LEAST and end != last:
            continue
        step = LEAST
        while end - step >= before + LEAST:
            found.add(end - step)
            step *= 2
        found.add(end)
        before = end
    found -= set(sorted(place for place in found if place <= lasting)[:-1])
    return sorted(place for place in found if place > start)[-MOST:]


def is_cuttable(caches: Sequence[Any]) -> bool:
    """Whether they can be taken back to any place before, and no row of theirs has gone or has a
    rank from what came behind that place: by scores, or by the bits that it has left."""
    ranked = (one for one in evicting_caches(caches) if one.config.max_kv_size is not None)
    return not any(one.policy.needs_scores or one.config.light_bits for one in ranked) and all(
        one.is_trimmable() and not (getattr(one, "evicted", 0) or getattr(one, "start_position", 0))
        for one in parts_of(caches)
    )


def held_tokens(caches: Sequence[Any]) -> list[int]:
    """The tokens that each cache has seen that knows it."""
    return [int(one.offset) for one in parts_of(caches) if hasattr(one, "offset")]


def _cut(caches: Sequence[Any], length: int) -> bool:
    """Take back what goes beyond so many tokens; False where that cannot be."""
    surplus = [max(held_tokens([one]), default=length) - length for one in caches]
    if not any(surplus):
        return True
    with suppress(ValueError):  # a few tokens can be taken back, and not so many
        if all(one.is_trimmable() for one in caches):
            for one, tokens in zip(caches, surplus, strict=True):
                one.trim(tokens)
            return True
    return False
