"""Faults of shared rows: each is noticed by a life against the slow reference."""

from __future__ import annotations

from functools import partial

import pytest

from cache_courses import Course
from faults.change import argument, assigned, condition, replaced
from faults.place import Fault, assert_caught

SETTINGS = {"max_kv_size": 20, "prefix_size": 6, "recent_size": 5, "evict_every": 4}


def shared(column: str = "dense", policy: str = "h2o-ema", rows: int = 6, **settings) -> None:
    """Sequences that begin alike come and go, and one that does not joins them."""
    course = Course(column, policy, **SETTINGS | settings)
    course.chunk(9)
    course.chunk(20)
    batch = course.share(rows, 3)
    batch.tokens(7)
    batch.prompts([3, 1, 20], step=12)
    batch.chunk(9)
    batch.filter([2, 0])
    batch.extend(batch.merged([1]))
    batch.tokens(6)
    for how in ("copy", "state", "file"):
        batch.copied(how).tokens(5)
    batch.extract(2).tokens(5)
    other = course.new(1, 5)
    other.prompts([9])
    batch.extend(other)
    batch.tokens(8)


def taken_back() -> None:
    """A trim that reaches into the shared rows."""
    course = Course(**SETTINGS)
    course.chunk(9)
    batch = course.share(6, 2)
    batch.trim(5)
    batch.tokens(12)


def not_shared() -> None:
    """Rows that are never evicted, ranked or not."""
    course = Course(policy="keydiff", **SETTINGS)
    course.chunk(30)
    course.tokens(20)


FAULTS = [
    Fault(
        "shared rows are beside the budget",
        "caches.cache:H2OKVCache._plan",
        replaced("-", "+", of="prefix_rows"),
        shared,
    ),
    Fault(
        "rows of the prefix that are not shared may go",
        "caches.cache:H2OKVCache._stand_on",
        assigned("self._skip").becomes("0"),
        not_shared,
    ),
    Fault(
        "as many rows are passed over as if none were shared",
        "caches.cache:H2OKVCache._stand_on",
        assigned("self._skip").becomes("self.config.prefix_size"),
        partial(shared, policy="random"),
    ),
    Fault(
        "attention sees the own rows only",
        "caches.scored:ScoredRows._attend",
        argument("merged_attention", "shared").becomes("None"),
        shared,
    ),
    Fault(
        "weights of a chunk are of the own rows",
        "caches.scored:ScoredRows.score_chunk",
        assigned("prefix").becomes("None"),
        partial(shared, policy="tova"),
    ),
    Fault(
        "what went before rows were shared is forgotten",
        "caches.prefix:Prefix.taken_from",
        argument("place", 0).becomes("None"),
        shared,
    ),
    Fault(
        "who holds all rows again has those of the prefix behind its own",
        "caches.prefix:Prefix.whole",
        argument("place", 0).becomes("_[:, :, ::-1]"),
        shared,
    ),
    Fault(
        "sequences on other rows join without their prefix",
        "caches.batch:BatchH2OKVCache._join",
        condition(of="shared", at=2).becomes("False"),
        shared,
    ),
    Fault(
        "a sequence that leaves takes no prefix along",
        "caches.batch:BatchH2OKVCache.extract",
        argument("_start", 3).becomes("None"),
        shared,
    ),
    Fault(
        "a state has no shared rows",
        "caches.stored:StoredRows.prefix_rows",
        condition().becomes("True"),
        shared,
    ),
    Fault(
        "a trim that reaches into the prefix stops before it",
        "caches.cache:H2OKVCache.trim",
        condition(of="lengths").becomes("False"),
        taken_back,
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_fault_is_caught(fault: Fault) -> None:
    assert_caught(fault)
