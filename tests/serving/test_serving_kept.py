"""Caches kept by their tokens, including snapshots, against a scan of everything that is kept."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_h2o.serving.kept import Entry, Kept, common, key_of
from mlx_h2o.serving.snapshots import Snapshots

# Few tokens that are repeated, so that prompts share beginnings of all lengths.
prompts = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3)), min_size=1, max_size=5).map(
    lambda runs: [token for token, count in runs for _ in range(count)]
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "put", "use", "drop"]), prompts), max_size=14),
    prompts, st.integers(0, 60),
)  # fmt: skip
def test_it_finds_what_a_scan_finds(changes, asked, most):
    kept, scan = Kept[None](3), {}  # used longest ago first
    for change, tokens in changes:
        there = scan.pop(tuple(tokens), None)
        assert kept.use(key_of(tokens)) == (there is not None)
        if change == "put":
            there = Entry(key_of(tokens), len(tokens), None)
            kept.put(there)
        elif change == "drop":
            kept.drop(key_of(tokens))
            there = None
        if there is not None:
            scan[tuple(tokens)] = there
    assert list(kept) == list(scan.values()) and len(kept) == len(scan)
    assert kept.nbytes == sum(map(len, scan))
    found = list(kept.nearest(key_of(asked)))
    assert [shared for shared, _ in found] == sorted((one for one, _ in found), reverse=True)
    expected = {(common(tokens, asked), one) for tokens, one in scan.items()}
    assert len(set(found)) == len(found) and set(found) == {one for one in expected if one[0]}
    gone = kept.shrink(most)
    assert [*gone, *kept] == list(scan.values()) and kept.nbytes <= most and len(kept) <= 3


@dataclass
class FakeCache:
    """A cache of one byte, which knows how many tokens it has seen."""

    offset: int
    trims: bool
    nbytes: int = 1

    state = mx.zeros(1)

    def is_trimmable(self):
        return self.trims

    def trim(self, count):
        self.offset -= count


class Scan:
    """What :class:`Snapshots` promises, by looking at everything."""

    def __init__(self, most):
        self.most, self.kept = most, []  # (tokens, can be cut), used longest ago first

    def best(self, asked, kept=None):
        found = 0, None
        for tokens, cuttable in kept or self.kept:
            shared = common(tokens, asked)
            length = min(shared, len(asked) - 1) if cuttable else shared
            if (cuttable or shared == len(tokens) < len(asked)) and length > found[0]:
                found = length, (tokens, cuttable)
        return found

    def keep(self, tokens, cuttable):
        length, there = self.best([*tokens, 0])
        if length == len(tokens) and there is not None:
            return
        if cuttable:
            self.kept = [
                (one, cuts) for one, cuts in self.kept if not (cuts and one == tokens[: len(one)])
            ]
        self.kept = [*self.kept, (tokens, cuttable)][-self.most :]

    def use(self, one):
        self.kept.remove(one)
        self.kept.append(one)


@settings(deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["keep", "keep", "find"]), prompts, st.booleans())),
)
def test_snapshots_are_those_of_a_scan(most, changes):
    snapshots, scan = Snapshots(most), Scan(most)
    for change, tokens, cuttable in changes:
        if change == "keep":
            too_large = len(tokens) == 6  # which leaves the others
            snapshots.keep(tokens, [FakeCache(len(tokens), cuttable, 1 + too_large * most)])
            if not too_large:
                scan.keep(tokens, cuttable)
        else:
            length, _ = scan.best(tokens)
            assert snapshots.best(key_of(tokens))[0] == length
            caches, found = snapshots.find(tokens)
            assert found == length and [one.offset for one in caches] == [length] * bool(length)
            if length:  # of several that are as good, either
                used = seen(list(snapshots)[-1])
                assert scan.best(tokens, [used])[0] == length
                scan.use(used)
        held = list(map(seen, snapshots))
        assert held == scan.kept and snapshots.nbytes == len(held) == len(snapshots)


def seen(snapshot):
    return np.frombuffer(snapshot.key, ">u4").tolist(), snapshot.cuttable


def test_what_serves_a_whole_key_is_found_behind_longer_entries():
    kept = Kept[None](share=0.5)
    for tokens in ([5, 6, 0, *range(9)], [5, 6, 1]):  # one goes on with token 0
        kept.put(Entry(key_of(tokens), 1, None, cuttable=True))
    found = [kept.whole(key_of(key)) for key in ([5, 6], [5], [5, 6, 0, 0, 1, 2], [5, 6, 0], [7])]
    assert [one and len(one) for one in found] == [3, None, 12, None, None]


def test_common_counts_what_is_the_same():
    assert common([1, 2, 3], [1, 2, 4]) == 2 and common([], [1]) == 0
    assert common(np.array([1, 2]), [1, 2, 3]) == 2 and common([5], [6]) == 0
