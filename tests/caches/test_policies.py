"""Policies: what each accumulates and how it ranks rows."""

import re

import mlx.core as mx
import numpy as np

from mlx_h2o import H2OConfig, H2OKVCache, policies
from mlx_h2o.operations.composed import accumulating
from paths import ROOT


def rows(*, keys, importance=None, positions=None, offset=100):
    keys = mx.array(keys)
    shape = keys.shape[:3]
    return policies.Rows(
        keys=keys,
        values=keys,
        importance=mx.zeros(shape) if importance is None else mx.array(importance),
        positions=mx.broadcast_to(mx.arange(shape[2]), shape) if positions is None else positions,
        offset=offset,
    )


def test_h2o_by_hand():
    policy = H2OConfig.of(policy="h2o-ema", decay=0.75).policy
    before = mx.array([[[1.0, float("nan"), 2.0, float("nan")]]])
    # Two query heads, one KV head. Row 1 is new, row 2 is seen by one head, row 3 by none.
    scores = mx.array([[[[4.0, -6.0, -np.inf, -np.inf]], [[-8.0, 2.0, 5.0, -np.inf]]]])
    after = np.array(policy.accumulate(before, scores))
    np.testing.assert_allclose(after, [[[0.75 * 1 + 0.25 * 2, 2.0, 1.5 + 1.25, np.nan]]])


def test_a_score_that_is_nan_counts_as_masked():
    before = mx.array([[[1.0, 2.0]]])
    after = accumulating.accumulate_scores(before, mx.array([[[[float("nan"), 2.0]]]]), decay=0.5)
    assert after.tolist() == [[[1.0, 2.0]]]


def test_window_ranks_by_age_at_any_position():
    start = 2**29
    positions = mx.arange(start, start + 5)[None, None]
    ranks = H2OConfig.of(policy="window").policy.rank(
        rows(keys=np.zeros((1, 1, 5, 4), np.float32), positions=positions, offset=start + 5)
    )
    assert ranks.tolist() == [[[-5.0, -4.0, -3.0, -2.0, -1.0]]]


def test_keydiff_evicts_the_key_most_like_the_others():
    keys = np.array([[[[1, 0.1], [1, 0], [1, -0.3], [-1, 0.2]]]], np.float32)
    ranks = np.array(H2OConfig.of(policy="keydiff").policy.rank(rows(keys=keys)))[0, 0]
    assert ranks.argmin() == 1
    assert ranks.argmax() == 3


def test_the_policy_of_the_documentation_works(monkeypatch):
    """docs/internals/extending.md: its example, added to the table, evicts."""
    page = (ROOT / "docs" / "internals" / "extending.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    written: dict = {}
    exec(example, written)
    monkeypatch.setitem(policies._POLICIES, "value-norm", written["ValueNorm"])
    sizes = {"max_kv_size": 4, "sink_size": 1, "recent_size": 1, "evict_every": 1}
    cache = H2OKVCache(H2OConfig.of(policy="value-norm", **sizes))
    for length in (1.0, 3.0, 2.0, 5.0, 4.0, 0.5):
        row = mx.full((1, 1, 1, 2), length)
        cache.update_and_fetch(row, row)
    assert sorted(cache.values[0, 0, :, 0].tolist()) == [0.5, 1.0, 4.0, 5.0]


def test_the_table_of_the_documentation_is_complete():
    page = (ROOT / "docs" / "design.md").read_text()
    page, _, _ = page.partition("## Policies")[2].partition("### Measured")
    assert tuple(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == policies.names()
    page = (ROOT / "docs" / "python" / "policies.md").read_text()
    assert {*re.findall(r"^::: mlx_h2o\.policies\.(\w+)$", page, re.M)} == {*policies.__all__}
