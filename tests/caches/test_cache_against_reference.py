"""Every kind of cache through one series of events, against the slow reference after each event.

A plain run tries half of a set that contains all pairs of column, policy, mode and group; the
exhaustive session tries the whole set, and all triples of the first three.
"""

from itertools import combinations, product
from typing import Any

import pytest

from cache_columns import COLUMNS, IN_BATCHES, POLICY_COLUMNS
from cache_courses import Course
from mlx_h2o import policies

MODES = (
    *((kind, drafts) for kind in ("alone", "three alike") for drafts in (0, 2, 4)),
    *((kind, 0) for kind in ("ragged", "ragged, padded on the left", "ragged, token by token")),
)
"""Sequences, and how many tokens may be drafted at a time."""

GROUPS = (1, 4, 16)
AXES = (tuple(COLUMNS), policies.names(), MODES, GROUPS)


def covering() -> list[tuple]:
    """All columns with all policies, the other settings so that every pair of two comes up."""
    found = []
    for c, p in product(range(len(COLUMNS)), range(len(AXES[1]))):
        mode, policy = MODES[(c + p) % len(MODES)], AXES[1][p]
        found.append((AXES[0][c], policy, mode, GROUPS[(c // 3 + 2 * (p // 3)) % 3]))
    return found


def test_the_covering_set_has_every_pair():
    cases = covering()
    for one, other in combinations(range(len(AXES)), 2):
        there = {(case[one], case[other]) for case in cases}
        pairs = set(product(AXES[one], AXES[other]))
        if (one, other) == (0, 1):
            pairs = {(column, policy) for policy, column in POLICY_COLUMNS}
        assert there == pairs, (one, other)


def of_one_clock(course: Course, drafts: int) -> None:
    """Short and long chunks, tokens, and drafts where there are any."""
    course.chunk(5)
    course.tokens(2)
    course.trim(3)  # nothing has gone
    course.chunk(12)
    course.tokens(9)
    course.chunk(20)
    course.flush()
    course.tokens(10)
    course.chunk(3)
    drafting(course, drafts)
    course.tokens(5)
    course.chunk(40)
    course.chunk(9)
    course.copied("state").tokens(3)
    course.copied().chunk(4)
    course.tokens(9)


def of_ragged_sequences(course: Course, joining: Course, *, left: bool, step: int) -> None:
    """Prompts with padding, sequences that leave and join."""
    course.prompts([5, 17, 9], step=step, left=left)
    course.tokens(6)
    course.prompts([1, 30, 2], step=step)
    course.tokens(3)
    course.prompts([3, 3, 3])
    course.filter([2, 0])
    course.tokens(2)
    joining.prompts([7])
    course.extend(joining)
    course.tokens(7)
    course.extract(1).tokens(3)
    course.copied("state").tokens(2)
    course.prompts([40, 0, 12])
    course.tokens(9)


def drafting(course: Course, drafts: int) -> None:
    if drafts:
        course.draft(1, drafts)
        course.draft(drafts, 1)
        course.draft(2, drafts - 1, at_once=False)
        course.draft(0, drafts + 1)
        course.tokens(2)
        course.draft(drafts + 1, 0)


def live(column: str, policy: str, mode: tuple[str, int], group: int, **settings: Any) -> None:
    kind, drafts = mode
    if kind.startswith("ragged"):
        given = {"evict_every": group, **settings}
        courses = [Course(column, policy, n, seed=n, **given) for n in (3, 1)]
        left, step = kind.endswith("left"), 1 if kind.endswith("token") else 8
        of_ragged_sequences(*courses, left=left, step=step)
    else:
        count, given = None if kind == "alone" else 3, {"speculative": drafts, **settings}
        course = Course(column, policy, count, equal=True, evict_every=group, **given)
        of_one_clock(course, drafts)


@pytest.mark.matrix(8)
@pytest.mark.parametrize(("column", "policy", "mode", "group"), covering())
def test_a_life(column, policy, mode, group):
    live(column, policy, mode, group)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("policy", "column"), POLICY_COLUMNS)
def test_every_life(column, policy):
    """Every mode but those of ``test_a_life``, and the sizes of groups in turn."""
    first = AXES[0].index(column) + AXES[1].index(policy)
    lived = {case[:3] for case in covering()}
    for place, mode in enumerate(MODES, first):
        if (column, policy, mode) not in lived:
            live(column, policy, mode, GROUPS[place % len(GROUPS)])


@pytest.mark.matrix(6)
@pytest.mark.parametrize("policy", policies.names())
def test_long_chunks(policy):
    """More queries than the average looks back, of sequences that stand apart."""
    course = Course("dense", policy, 2, max_kv_size=40, recent_size=10, evict_every=4)
    course.prompts([150, 33])
    course.tokens(6)
    course.prompts([31, 64])
    course.tokens(6)


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("policy", "column"), IN_BATCHES)
def test_padding_on_the_left_is_no_part_of_a_sequence(column, policy):
    course = Course(column, policy, 2)
    course.cache.prepare(left_padding=[5, 0])
    assert course.cache.offset.tolist() == [-5, 0]
    course = Course(column, policy, 2)
    course.prompts([3, 8], step=4, left=True)
    course.tokens(12)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("budget", [3, 4, 5])
@pytest.mark.parametrize("policy", policies.names())
def test_small_budgets(policy, budget):
    """No sinks, a window of one row, all that remains in the others."""
    course = Course("dense", policy, max_kv_size=budget, sink_size=0, recent_size=1)
    course.tokens(budget)
    course.chunk(2)
    course.tokens(5)
    batch = Course("dense", policy, 2, max_kv_size=budget, sink_size=1, recent_size=1)
    batch.prompts([1, budget + 1], step=1)
    batch.tokens(4)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("policy", ["h2o", "keydiff"])
@pytest.mark.parametrize("column", ["dense", "4 bits", "published", "turbo3"])
def test_all_rows_may_leave_together(column, policy, batch):
    """A group as large as the budget, one window row wide: the sequence starts again."""
    sizes = {"max_kv_size": 3, "sink_size": 0, "recent_size": 1, "heavy_size": 2}
    course = Course(column, policy, batch, evict_every=4, **sizes)
    course.tokens(4)
    assert course.cache.size() == 1
    course.tokens(4)
