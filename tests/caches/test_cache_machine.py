"""Random series of events, drawn by hypothesis; the reference knows what each must leave."""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache_columns import COLUMNS, EVICTING
from cache_courses import Course
from mlx_h2o import policies

EXAMPLES = int(os.environ.get("MLX_H2O_EXAMPLES", "300"))
"""Examples of each machine in an exhaustive run."""

LENGTHS = st.sampled_from([1, 1, 2, 3, 5, 9, 16])


def quick(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


class Life(RuleBasedStateMachine):
    """One sequence, or several with one clock."""

    course: Course
    falls: bool  # the budget as a text grows
    batch = st.sampled_from([None, 2])
    speculative = st.sampled_from([0, 0, 1, 3])

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        column = data.draw(st.sampled_from(sorted(COLUMNS)), "column")
        speculative = data.draw(self.speculative, "speculative")
        least = 3 if COLUMNS[column].mixed else 0
        dense = COLUMNS[column].settings.get("dense_size", 0)
        sinks = data.draw(st.integers(0, 2), "sinks")
        recent = data.draw(st.integers(least + 1 if dense else 1, 6), "recent")
        heavy = data.draw(st.integers(0, 5), "heavy")
        prefix = data.draw(st.sampled_from([0, 0, 1, 4, 9]), "prefix")
        first = max(sinks, prefix)
        budget = max(first + recent + heavy, first + speculative + 3)
        preallocate = not COLUMNS[column].mixed and data.draw(st.booleans(), "preallocate")
        few, most = first + speculative + 2, 0 if COLUMNS[column].mixed or preallocate else 3
        shorter = st.dictionaries(
            st.integers(few, 60), st.integers(few, budget + 20), max_size=most
        )
        rows_at = data.draw(shorter, "rows_at")
        numbers = [*rows_at.values()]
        if speculative:  # a text that becomes shorter keeps its budget, but not when it is saved
            numbers = sorted((max(budget, one) for one in numbers), reverse=True)
        self.falls = [*numbers, budget] == sorted([*numbers, budget], reverse=True)
        self.course = Course(
            column, data.draw(st.sampled_from(policies.names()), "policy"),
            data.draw(self.batch, "batch"), equal=not isinstance(self, RaggedLife),
            max_kv_size=budget, sink_size=sinks, prefix_size=prefix,
            recent_size=budget - first - heavy, heavy_size=heavy, speculative=speculative,
            evict_every=data.draw(st.sampled_from([1, 2, 4, 16]), "evict_every"),
            context_size=data.draw(st.sampled_from([None, 8, 24]), "context_size"),
            preallocate=preallocate, rows_at=tuple(zip(sorted(rows_at), numbers, strict=True)),
        )  # fmt: skip

    @property
    def room(self) -> bool:
        """Whether the sequences have tokens left."""
        return all(reference.offset < 350 for reference in self.course.references)

    @precondition(lambda self: self.room)
    @rule(length=LENGTHS)
    def chunk(self, length: int) -> None:
        self.course.chunk(length)

    @precondition(lambda self: self.room)
    @rule(count=st.integers(1, 8))
    def tokens(self, count: int) -> None:
        self.course.tokens(count)

    @precondition(lambda self: self.room and self.course.config.speculative)
    @rule(data=st.data(), at_once=st.booleans())
    def draft(self, data: st.DataObject, at_once: bool) -> None:
        total = data.draw(st.integers(1, self.course.config.speculative + 1), "drafted")
        accepted = data.draw(st.integers(0, total), "accepted")
        self.course.draft(accepted, total - accepted, at_once=at_once)

    @precondition(lambda self: self.falls)
    @precondition(lambda self: not (self.course.cache.evicted or self.course.surplus))
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        shortest = min(reference.offset for reference in self.course.references)
        self.course.trim(data.draw(st.integers(0, shortest), "trimmed"))

    @precondition(lambda self: self.course.shareable)
    @rule(data=st.data(), count=st.integers(1, 3))
    def some_share_a_prefix(self, data: st.DataObject, count: int) -> None:
        rows = data.draw(st.integers(1, self.course.shareable), "shared")
        alone = self.course.extract(0) if self.course.ragged else self.course
        self.course = alone.share(rows, count)

    @rule()
    def flush(self) -> None:
        self.course.flush()

    @rule(how=st.sampled_from(["copy", "state", "file"]))
    def go_on_with_a_copy(self, how: str) -> None:
        self.course = self.course.copied(how)

    @precondition(lambda self: self.course.config.policy.name in EVICTING)
    @precondition(lambda self: not self.course.config.speculative)  # whose scores wait
    @rule(policy=st.sampled_from(EVICTING))
    def another_policy(self, policy: str) -> None:
        self.course = self.course.under(policy)

    @invariant()
    def agrees(self) -> None:
        self.course.check()


class RaggedLife(Life):
    """A merged batch, whose sequences join, leave and are of any length."""

    batch = st.sampled_from([1, 2, 3])
    speculative = st.just(0)  # there is no speculative decoding of batches

    @precondition(lambda self: self.room)
    @rule(data=st.data(), step=st.sampled_from([1, 4, 64]))
    def prompts(self, data: st.DataObject, step: int) -> None:
        count = len(self.course.sequences)
        lengths = st.lists(st.integers(0, 14), min_size=count, max_size=count)
        lengths = data.draw(lengths.filter(any), "lengths")
        left = self.course.cache.empty() and data.draw(st.booleans(), "padded on the left")
        self.course.prompts(lengths, step=step, left=left)

    @rule(data=st.data())
    def some_leave(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(self.course.sequences))), "order")
        self.course.filter(order[: data.draw(st.integers(1, len(order)), "left")])

    @precondition(lambda self: len(self.course.sequences) < 4)
    @rule(length=st.integers(0, 16), seed=st.integers(10, 99))
    def one_joins(self, length: int, seed: int) -> None:
        other = self.course.new(1, seed)
        if length:
            other.prompts([length])
        self.course.extend(other)

    @precondition(lambda self: len(self.course.sequences) < 4)
    @rule(data=st.data())
    def one_joins_that_began_here(self, data: st.DataObject) -> None:
        """The copy uses the same rows if they are shared."""
        place = data.draw(st.integers(0, len(self.course.sequences) - 1), "place")
        shared = self.course.cache.prefix_rows
        self.course.extend(self.course.merged([place]))
        assert self.course.cache.prefix_rows == shared

    @rule(data=st.data())
    def they_are_merged_anew(self, data: st.DataObject) -> None:
        places = range(len(self.course.sequences))
        self.course = self.course.merged(data.draw(st.permutations(places), "order"))

    @rule(data=st.data())
    def one_goes_on_alone(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.course.sequences) - 1), "place")
        self.course.extract(place).tokens(1)


@pytest.mark.parametrize("machine", [Life, RaggedLife])
def test_any_life(machine):
    run_state_machine_as_test(machine, settings=quick(15))


@pytest.mark.exhaustive
@pytest.mark.parametrize("machine", [Life, RaggedLife])
def test_any_of_many_lives(machine):
    run_state_machine_as_test(machine, settings=settings(quick(EXAMPLES), stateful_step_count=30))
