"""Seeded faults in what is known of the keys: each is caught by the checks that the suite runs."""

from __future__ import annotations

import numpy as np
import pytest

import test_key_ranks_groups as groups
import test_key_ranks_speculation as drafts
from mlx_h2o import BatchH2OKVCache
from mlx_h2o.caches import key_ranks
from mlx_h2o.caches.speculative_cache import cache_of
from test_cache_faults import Fault, put_in_place


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    for name in ("SECOND_READ_BYTES", "GROUP_READ_BYTES", "DRAFT_READ_BYTES"):
        monkeypatch.setattr(key_ranks, name, -1)


def rows_in_groups():
    """The ranks that attention gave are those of the keys, before every eviction."""
    rng = np.random.default_rng(1)
    ours, theirs = (groups.evicting_cache(groups.keydiff(16, 3)) for _ in range(2))
    for _ in range(80):
        tokens = groups.tokens(rng, 1)
        groups.attend(ours, *tokens)
        groups.attend(theirs, *tokens, routed=False)
        assert groups.kept(ours) == groups.kept(theirs)


def ragged_batch():
    rng = np.random.default_rng(2)
    for every in (1, 3):
        config = groups.keydiff(8, every)
        singles = [groups.alone(config, rows, rng) for rows in (20, 8, 3)]
        batch = BatchH2OKVCache.merge(singles)
        for _ in range(40):
            tokens = groups.tokens(rng, 3)
            groups.attend(batch, *tokens)
            for place, one in enumerate(singles):
                own = [part[place : place + 1] for part in tokens]
                groups.attend(one, *own, routed=False)
                assert groups.kept(batch.extract(place)) == groups.kept(one)


def drafted():
    rng = np.random.default_rng(3)
    ours, theirs = (cache_of(drafts.keydiff(12, 3)) for _ in range(2))
    for turn in range(80):
        for length in ([4], [1, 1, 1], [2])[turn % 3]:
            keys = rng.standard_normal((1, 2, length, 16)).astype(np.float32)
            drafts.attend(ours, keys)
            drafts.attend(theirs, keys, routed=False)
            assert drafts.kept(ours) == drafts.kept(theirs)
        back = turn % 7 % 3
        ours.trim(back)
        theirs.trim(back)
        assert drafts.kept(ours) == drafts.kept(theirs)


FAULTS = [
    Fault(
        "rows that went are still in the sum",
        "caches.key_ranks",
        "key_sum = key_sum - _statistics_of(lost, store.attention_settings)[0]",
        "pass",
        (("KeyRanks", "through_compaction"),),
        rows_in_groups,
    ),
    Fault(
        "rows that came are not in the sum",
        "caches.key_ranks",
        "self, statistics=(own_sum + key_sum,",
        "self, statistics=(own_sum,",
        (("KeyRanks", "_with_appended"),),
        rows_in_groups,
    ),
    Fault(
        "norms stay where they are in a gather",
        "caches.key_ranks",
        "mx.take_along_axis(inverse_norms, kept, axis=2)",
        "inverse_norms[:, :, :keep]",
        (("KeyRanks", "through_compaction"),),
        rows_in_groups,
    ),
    Fault(
        "what is known of a batch is of other sequences",
        "caches.batch_ranks",
        "key_sum, inverse_norms = key_sum[index], inverse_norms[index]",
        "key_sum, inverse_norms = (a[: len(members)] for a in (key_sum, inverse_norms))",
        (("mlx_h2o.caches.batched", "sliced_ranks"),),
        ragged_batch,
    ),
    Fault(
        "norms of a batch are in front of its padding",
        "caches.batch_ranks",
        "return mx.concatenate([padding, inverse_norms], axis=2)",
        "return mx.concatenate([inverse_norms, padding], axis=2)",
        (("mlx_h2o.caches.batched", "joined_ranks"),),
        ragged_batch,
    ),
    Fault(
        "one token is compared with itself among the others",
        "caches.provisional_ranks",
        "[:, :, 1:]\n            sums = mx.concatenate([sums, sums + more], axis=2)",
        "[:, :, :-1]\n            sums = mx.concatenate([sums, sums + more], axis=2)",
        (("ProvisionalRanks", "attend"),),
        drafted,
    ),
    Fault(
        "drafts that are taken back stay among the directions",
        "caches.provisional_ranks",
        "directions=self.directions[:, :, : self.directions.shape[2] - count]",
        "directions=self.directions",
        (("ProvisionalRanks", "without_newest"),),
        drafted,
    ),
    Fault(
        "norms do not move with their rows",
        "caches.provisional_ranks",
        "norms = exchanged(self.inverse_norms, source, target, axis=2)",
        "norms = self.inverse_norms",
        (("ProvisionalRanks", "exchanged"),),
        drafted,
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_suite_catches(fault, monkeypatch):
    with monkeypatch.context() as patch:
        put_in_place(fault, patch, seeded=False)
        fault.check()
    with monkeypatch.context() as patch:
        put_in_place(fault, patch, seeded=True)
        with pytest.raises((AssertionError, ValueError)):
            fault.check()
    fault.check()
