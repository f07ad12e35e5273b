"""Drafts: the newest rows can be trimmed at any time, which leaves no trace."""

import numpy as np
import pytest

from cache_columns import POLICY_COLUMNS
from cache_courses import Course
from cache_invariants import check_same, seen_from_outside
from mlx_h2o import H2OKVCache


def without_padding(course: Course) -> dict:
    found = seen_from_outside(course.cache)
    return {name: value for name, value in found.items() if name != "settings"}


@pytest.mark.matrix(8)
@pytest.mark.parametrize(("policy", "column"), POLICY_COLUMNS)
def test_what_was_rejected_does_not_matter(policy, column):
    """Caches whose drafts differ are the same when these are gone, to the bit."""
    one, other = (Course(column, policy, speculative=3) for _ in range(2))
    for sequence in other.sequences:
        sequence.rng = np.random.default_rng(12345)
    for course in (one, other):
        course.chunk(20)
    for accepted, rejected in ((1, 3), (3, 1), (0, 4), (0, 4), (2, 2), (4, 0), (1, 2), (1, 3)):
        for course in (one, other):  # the same tokens, and drafts of its own
            course.draft(accepted, rejected)
        check_same(*map(without_padding, (one, other)))


def test_a_draft_before_the_budget_falls_leaves_no_trace():
    """The newest rows do not all lie last then."""
    course = Course(speculative=1, max_kv_size=4, sink_size=0, recent_size=4, rows_at=((28, 23),))
    course.chunk(25)
    course.draft(0, 1)
    course.chunk(5)


def test_the_newest_row_stays_when_a_budget_falls_almost_to_its_sinks():
    course = Course(max_kv_size=13, sink_size=9, recent_size=4, heavy_size=0, rows_at=((16, 11),))
    course.chunk(16)
    assert [row.position for row in course.references[0].heads[0]] == [*range(9), 14, 15]


def test_trims_that_reach_too_far_are_refused():
    course = Course(speculative=2)
    course.chunk(30)
    course.tokens(3)
    assert course.cache.is_trimmable()
    before = seen_from_outside(course.cache)
    said = r"\[H2OKVCache.trim\] .* asked to take back 4 tokens, expected"
    with pytest.raises(ValueError, match=said):
        course.cache.trim(4)
    check_same(before, seen_from_outside(course.cache))
    course.trim(2)
    with pytest.raises(ValueError, match="take back 2 tokens, expected at most 1"):
        course.cache.to_quantized(32, 8).trim(2)
    for one in (course, *map(course.copied, ("copy", "state", "file"))):
        with pytest.raises(ValueError, match="take back 2 tokens, expected at most 1"):
            one.cache.trim(2)
        one.trim(1)
        one.tokens(2)


def test_batches_take_no_drafts():
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.merge\] speculative is 2, expected 0"):
        H2OKVCache.merge([Course(speculative=2).cache])
