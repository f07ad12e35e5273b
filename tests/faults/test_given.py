"""Faults of the checks of what generation is given: each is noticed by its tests."""

from __future__ import annotations

from functools import cache

import pytest

import mlx_h2o
from faults.change import assigned, condition
from faults.place import Fault, assert_caught
from test_given import KNOWN
from test_given import test_caches_of_heads_apart_fit as heads_apart
from test_given import test_caches_that_do_not_fit as other_caches
from test_given import test_drafts_of_another_vocabulary as drafts
from test_given import test_numbers_of_tokens as limits
from test_given import test_tokens_that_are_none as no_tokens
from test_given import test_without_a_limit as endless


@cache
def demo():
    return mlx_h2o.load("demo")


def caches():
    return mlx_h2o.make_prompt_cache(demo()[0], 64, layers="equal")


FAULTS = [
    Fault(
        "the first id beyond the vocabulary is taken",
        "lm.checks:checked_tokens",
        condition(of="token").becomes("not 0 <= token <= min(sizes)"),
        lambda: no_tokens([KNOWN], f"has the token id {KNOWN}", demo(), caches()),
    ),
    Fault(
        "ids below zero are taken",
        "lm.checks:checked_tokens",
        condition(of="token").becomes("token >= min(sizes)"),
        lambda: no_tokens([1, -1], "has the token id -1", demo(), caches()),
    ),
    Fault(
        "a draft model of any vocabulary is taken",
        "lm.checks:checked_tokens",
        condition(of="PADDING").becomes("False"),
        lambda: drafts(demo()),
    ),
    Fault(
        "a cache is taken twice",
        "lm.checks:check_caches",
        assigned("twice").becomes("False"),
        lambda: other_caches(demo(), caches()),
    ),
    Fault(
        "groups of heads are taken for another layer",
        "lm.checks:check_caches",
        assigned("own").becomes("(one.name for one in evicting_caches([cache]))"),
        lambda: heads_apart(demo()),
    ),
    Fault(
        "True is a number of tokens",
        "config:check_int",
        condition(of="bool").becomes("not isinstance(value, int) or value < least"),
        lambda: limits(True, demo(), caches()),
    ),
    Fault(
        "no limit is a limit of -1 with a draft model",
        "lm.generate:_prepared",
        condition(of="limit", at=2).becomes("False"),
        lambda: endless(True, demo()),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_fault_is_caught(fault: Fault) -> None:
    assert_caught(fault)
