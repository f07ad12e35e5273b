"""Faults of KV heads in groups and of their rows: each is noticed by its tests."""

from __future__ import annotations

from functools import partial

import pytest

import mlx_h2o
from faults.change import assigned, condition, returned
from faults.place import Fault, assert_caught
from test_head_groups import (
    test_each_group_is_a_cache_of_its_heads as by_hand,
)
from test_head_groups import (
    test_groups_of_one_budget_are_the_ungrouped_run as ungrouped,
)
from test_head_groups import (
    test_masks_with_an_axis_of_heads_are_cut as masks,
)
from test_rows_by_head import (
    test_a_text_that_grows_takes_rows_from_heads_that_do_not_retrieve as grows,
)
from test_rows_by_head import (
    test_no_head_gets_more_than_a_text_fills_or_less_than_settings_need as bounds,
)
from test_rows_by_head import (
    test_shares as by_share,
)

FAULTS = [
    Fault(
        "outputs stay in the order of the groups",
        "caches.heads:HeadGroups.attended_by",
        returned().becomes("mx.concatenate(outs, axis=1)"),
        partial(by_hand, "keydiff", {}),
    ),
    Fault(
        "outputs stay in the order of the groups, of one budget",
        "caches.heads:HeadGroups.attended_by",
        returned().becomes("mx.concatenate(outs, axis=1)"),
        partial(ungrouped, ((0, 2), (1,)), {}),
    ),
    Fault(
        "all groups have the first heads' mask",
        "caches.heads:HeadGroups.attended_by",
        assigned("of_heads", at=1).becomes("False"),
        partial(masks, "keydiff"),
    ),
    Fault(
        "heads get more rows than a text fills",
        "lm.layers:shares",
        assigned("top").becomes("2**31"),
        bounds,
    ),
    Fault(
        "heads that hardly retrieve get more rows too",
        "lm.layers:parts_of_mean",
        assigned("wide").becomes("np.sqrt(gains)"),
        partial(by_share, [[0.3], [0.02]], [145, 55]),
    ),
    Fault(
        "heads of a layer are two groups however near they are",
        "lm.layers:_two_levels",
        condition(of="APART").becomes("True"),
        bounds,
    ),
    Fault(
        "rows of a short text stay what they are as it grows",
        "caches.cache:H2OKVCache._make_room",
        condition(of="rows_at").becomes("False"),
        partial(grows, mlx_h2o.load("demo")[0], {"kv_bits": 8}),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_fault_is_caught(fault: Fault) -> None:
    assert_caught(fault)
