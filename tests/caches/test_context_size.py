"""Rows beyond the context that a model was trained for are evicted first."""

from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from cache_columns import POLICY_COLUMNS
from cache_courses import Course
from cache_folded import counts_of, everything_folds
from mlx_h2o import H2OConfig, H2OKVCache, fit_bytes, make_prompt_cache
from mlx_h2o.lm.routing import evicting_caches
from tiny_models import tiny_qwen3

CONTEXT = 24


@pytest.mark.matrix(8)
@pytest.mark.parametrize(("policy", "column"), POLICY_COLUMNS)
def test_every_policy_lets_them_go_first(policy, column):
    course = Course(column, policy, evict_every=3, context_size=CONTEXT)
    course.chunk(20)
    course.tokens(9)
    course.chunk(40)
    course.tokens(9)
    course.copied("file").tokens(6)


def test_rows_beyond_the_context_are_dropped_and_not_folded():
    """Without a context every token is in some row."""
    for context_size, lost in ((CONTEXT, True), (None, False)):
        course = Course("dense", "h2o", evict_every=2, context_size=context_size)
        with everything_folds():
            course.tokens(120)
        counts = counts_of(course.cache).sum(axis=-1)
        assert (counts < 119).all() if lost else np.allclose(counts, 120, rtol=1e-5)


@pytest.mark.parametrize("policy", ["keydiff", "h2o-ema", "h2o"])
def test_within_the_context_nothing_is_computed_for_it(policy, monkeypatch):
    """Not an operation more, until the first row may be too far back."""
    counted = Mock(wraps=mx.where)

    def operations(tokens: int, context_size: int | None) -> int:
        counted.reset_mock()
        sizes = {"max_kv_size": 14, "sink_size": 2, "recent_size": 5, "context_size": context_size}
        cache = H2OKVCache(H2OConfig.of(policy=policy, **sizes))
        for _ in range(tokens):
            row = mx.zeros((1, 2, 1, 32))
            cache.attend(row, *cache.update_and_fetch(row, row), scale=1.0)
        return counted.call_count

    monkeypatch.setattr(mx, "where", counted)
    within = CONTEXT + 2
    assert operations(within, CONTEXT) == operations(within, None)
    assert operations(within + 2, CONTEXT) > operations(within + 2, None)


def test_caches_of_a_model_have_the_context_that_it_names():
    model, draft = tiny_qwen3(), tiny_qwen3(layers=1)
    model.args.max_position_embeddings, draft.args.max_position_embeddings = 300, 200

    def sizes(**given) -> list[int | None]:
        caches = make_prompt_cache(model, draft_model=draft, **given)
        return [cache.config.context_size for cache in evicting_caches(caches)]

    assert sizes() == [300, 300, 200]
    assert sizes(max_kv_size=H2OConfig.of(max_kv_size=64)) == [300, 300, 200]
    assert sizes(budgets=[32, H2OConfig.of(max_kv_size=64)]) == [300, 300, 200]
    assert sizes(max_kv_bytes=100_000, kv_group_size=32) == [300, 300, 200]
    assert sizes(context_size=50) == [50] * 3
    assert sizes(context_size=0) == [0] * 3
    assert fit_bytes(model, 100_000, context_size=0, kv_group_size=32).config.context_size == 0
    del model.args.max_position_embeddings
    assert sizes() == [None, None, 200]
