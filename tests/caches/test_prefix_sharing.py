"""Sequences that share the rows of a prefix: each is as it is alone, and rows are stored once."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

from cache_invariants import check_same_rows
from lm.test_batch_generate import kept, tiny_gemma3
from mlx_h2o import BatchH2OKVCache, H2OConfig, H2OKVCache, make_prompt_cache, routing
from mlx_h2o.lm.generate import batch_generate, read_prompt
from mlx_h2o.lm.saving import load_prompt_cache, save_prompt_cache
from mlx_h2o.lm.sharing import shareable
from prefix_checks import LENGTH, PACKED, PREFIX, PROMPTS, SMALL, alone, merged, ran, standing
from tiny_models import random_prompt, tiny_llama, tiny_qwen3, tiny_tokenizer

pytestmark = [pytest.mark.downstream, pytest.mark.usefixtures("mlx_lm_stays_as_it_is")]

FEW = {"max_kv_size": None, **PACKED, "v_bits": 4}  # without its newest rows
NEWEST = PACKED | {"v_bits": 4, "dense_size": 8}
SETTINGS = {
    "small": SMALL,
    "8 bits": SMALL | PACKED,
    "K8 V4": SMALL | PACKED | {"v_bits": 4, "sparse_v": 1e-6, "evict_every": 5},
    "codes": SMALL | {"kv_format": "turbo3"},
    "large": {"max_kv_size": 400, "prefix_size": LENGTH},
    "protects more than is shared": {"max_kv_size": 80, "prefix_size": LENGTH + 9},
    "shares less than is common": {"max_kv_size": 80, "prefix_size": 40, "evict_every": 1},
    "sinks behind it": {"max_kv_size": 80, "prefix_size": 40, "sink_size": 45},
}


def answered(model, shared: bool, prompts=PROMPTS, count: int = 24, **given):
    return batch_generate(
        model, tiny_tokenizer(), prompts, max_tokens=count, share_prefix=shared,
        return_prompt_caches=True, return_token_ids=True, **given,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.matrix(5)
@pytest.mark.parametrize("step", [8, 24])  # what attention reads in parts, and what at once
@pytest.mark.parametrize("rows", SETTINGS)
@pytest.mark.parametrize(
    "policy",
    ["window", "keydiff", "h2o", "h2o-ema", "h2o-sum", "tova", "snapkv", "value-aware", "mix"],
)
def test_answers_and_rows_are_those_of_each_alone(policy, rows, step):
    model, given = tiny_qwen3(head_dim=32), SETTINGS[rows] | {"policy": policy}
    found = answered(model, True, prefill_step_size=step, **given)
    apart = answered(model, False, prefill_step_size=step, **given)
    for prompt, tokens, ours, others in zip(
        PROMPTS, found.token_ids, found.caches, apart.caches, strict=True
    ):
        # Chunks end at the same places, as lengths and steps are chosen.
        if given["prefix_size"] % step == 0:
            assert tokens == alone(model, prompt, step=step, **given)
        for one, other in zip(ours, others, strict=True):
            shared = min(LENGTH, given["prefix_size"])
            assert (one.prefix_rows, other.prefix_rows) == (shared, 0)
            assert (one.size(), one.evicted) == (other.size(), other.evicted)
            assert one.offset == other.offset == len(prompt) + 24
            assert given["prefix_size"] % step or kept(one) == kept(other)
    assert apart.stats.prompt_tokens - found.stats.prompt_tokens == shared * (len(PROMPTS) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
def test_other_models(make):
    """Llama without grouped heads; gemma3, two of three layers of which have windows."""
    model = make()
    found = answered(model, True, prefill_step_size=24, **SMALL)
    assert found.caches[0][-1].prefix_rows == LENGTH
    for prompt, tokens in zip(PROMPTS, found.token_ids, strict=True):
        assert tokens == alone(model, prompt, **SMALL)


@pytest.mark.parametrize("rows", [{"max_kv_size": None}, FEW])
def test_an_unbounded_cache_shares_all_that_is_common(rows, tmp_path):
    """Its newest rows are packed then; those of an answer are not."""
    model = tiny_qwen3(head_dim=32)
    found = answered(model, True, **rows)
    assert {cache.prefix_rows for one in found.caches for cache in one} == {LENGTH}
    for prompt, tokens, caches in zip(PROMPTS, found.token_ids, found.caches, strict=True):
        assert rows is FEW or tokens == alone(model, prompt, **rows)
        save_prompt_cache(tmp_path / "cache", caches)
        for one, other in zip(caches, load_prompt_cache(tmp_path / "cache"), strict=True):
            same_rows(one, other)
            assert rows is not FEW or 8 <= one.keys[-1].shape[2] < 40


@pytest.mark.matrix(2)
@pytest.mark.parametrize("rows", [{}, PACKED, NEWEST, FEW])
@pytest.mark.parametrize("policy", ["keydiff", "h2o-ema", "tova"])
def test_logits_are_close_to_those_alone(policy, rows):
    model, given = tiny_qwen3(head_dim=32), {"policy": policy, **rows}
    both = standing(model, **given)
    batch, single = merged(both), [[one.unshared() for one in caches] for caches in both]
    if not batch[0].config.mixed:  # whose newest rows are packed when they are shared
        single = [make_prompt_cache(model, **SMALL | given) for _ in range(3)]
        for caches in single:
            read_prompt(model, caches, PREFIX, 24)
    for turn, length in enumerate((20, 1, 7, 30, *[1] * 20)):
        tokens = [random_prompt(length, seed=10 * turn + line) for line in range(3)]
        found = ran(model, batch, tokens)
        expected = np.concatenate(
            [ran(model, one, [own]) for one, own in zip(single, tokens, strict=True)]
        )
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
    assert batch[0].evicted > 0 or rows is FEW


def test_bytes_of_shared_rows_count_once():
    model = tiny_qwen3()
    batch = merged(standing(model))[0]
    row = 2 * 2 * 16 * 4  # a key and a value in two heads
    assert (batch.nbytes, batch.size(), batch.empty()) == (LENGTH * row, LENGTH, False)
    ran(model, [batch, merged(standing(model))[1]], [[1, 2], [3, 4], [5, 6]])
    own = sum(array.nbytes for _, array in tree_flatten(list(batch.state[:4])))
    assert batch.nbytes - LENGTH * row <= own
    assert batch.extract(1).nbytes >= (LENGTH + 2) * row
    whole = batch.unshared()
    assert whole.nbytes >= 3 * (LENGTH + 2) * row
    assert whole.prefix_rows == 0 and batch.prefix_rows == LENGTH


def same_rows(one, other) -> None:
    """All rows are there, shared or not, to the bit."""
    assert (one.size(), one.evicted) == (other.size(), other.evicted)
    check_same_rows(one, other)
    assert np.array(one.offset).tolist() == np.array(other.offset).tolist()


@pytest.mark.parametrize("rows", [{}, PACKED, FEW])
def test_sequences_on_other_rows_take_copies(rows):
    model = tiny_qwen3(head_dim=32)
    first, second = standing(model, 2, **rows), standing(model, 1, **rows)
    ran(model, first[0], [PROMPTS[0][LENGTH:]])
    unshared = [one.unshared() for one in first[0]]
    same_rows(first[0][0], unshared[0])
    for others in (second[0], unshared, make_prompt_cache(model, **SMALL | rows)):
        mixed = H2OKVCache.merge([first[0][0], others[0]])
        assert mixed.prefix_rows == 0
        same_rows(mixed.extract(0), first[0][0])
    together, apart = H2OKVCache.merge([one[0] for one in first]), H2OKVCache.merge([unshared[0]])
    together.extend(apart)
    assert together.prefix_rows == 0
    same_rows(together.extract(0), first[0][0])
    same_rows(together.extract(2), first[0][0])
    nobody = BatchH2OKVCache(first[0][0].config)
    nobody.extend(H2OKVCache.merge([one[0] for one in first]))
    assert nobody._table.prefix is first[0][0]._table.prefix


@pytest.mark.parametrize("rows", [{}, FEW])
def test_a_trim_that_reaches_into_the_prefix_takes_rows_of_its_own(rows):
    model = tiny_qwen3(head_dim=32)
    first, second = standing(model, 2, **rows)
    ran(model, first, [[1, 2, 3]])
    assert [cache.trim(2) for cache in first] == [2, 2]
    assert (first[0].prefix_rows, first[0].offset) == (LENGTH, LENGTH + 1)
    assert [cache.trim(11) for cache in first] == [11, 11]
    assert (first[0].prefix_rows, first[0].size(), first[0].offset) == (0, 38, 38)
    found = ran(model, first, [PREFIX[38:]])[:, -1]
    again, text = make_prompt_cache(model, **SMALL | rows), PREFIX
    if rows:  # those of the prefix are packed now
        again, text = [one.unshared() for one in second], PREFIX[38:]
        assert [cache.trim(10) for cache in again] == [10, 10]
    np.testing.assert_allclose(found, ran(model, again, [text])[:, -1], rtol=1e-4, atol=1e-4)
    assert second[0].prefix_rows == second[0].size() == LENGTH  # as it was


def test_rows_that_are_set_are_its_own():
    first, second = standing(tiny_qwen3(), 2)
    before = np.array(second[0].keys)
    first[0].keys = mx.zeros_like(first[0].keys)
    assert first[0].prefix_rows == 0 and not np.array(first[0].keys).any()
    np.testing.assert_array_equal(np.array(second[0].keys), before)


# What is refused


def held(tokens: int = 40, cache=None, **given):
    cache = cache or H2OKVCache(H2OConfig.of(**{"max_kv_size": 64, "prefix_size": 36} | given))
    rows = mx.random.normal((1, 2, tokens, 32), key=mx.random.key(tokens))
    stored = cache.update_and_fetch(rows, rows[..., :16])
    cache.attend(mx.tile(rows, (1, 2, 1, 1)), *stored, scale=0.2, mask="causal")
    return cache


def test_values_are_of_another_size_than_the_keys_that_a_chunk_scores():
    alone, cache = held(policy="h2o-sum"), held(policy="h2o-sum")
    cache.share(36)
    expected, found = (held(12, one).scores[:, :, 36:] for one in (alone, cache))
    assert mx.allclose(found, expected, atol=1e-5).item()


@pytest.mark.parametrize(
    ("settings", "rows", "said"),
    [
        ({}, 37, r"share\] rows is 37, expected 1 to 36: .* holds 40 and keeps the first 36"),
        ({}, 0, "rows is 0, expected 1 to 36"),
        ({}, True, "rows is True, expected 1 to 36"),
        ({}, "4", "rows is '4', expected 1 to 36"),
        ({"max_kv_size": None}, 41, "rows is 41, expected 1 to 40"),
        ({"prefix_size": 0}, 4, "rows is 4, expected 1 to 0"),
        ({"speculative": 2}, 36, "has speculation, and cannot share rows"),
    ],
)
def test_rows_that_cannot_be_shared(settings, rows, said):
    with pytest.raises(ValueError, match=said):
        held(**settings).share(rows)


def test_kinds_that_share_nothing():
    mixed = H2OConfig.of(max_kv_size=64, kv_bits=8, light_bits=4, prefix_size=36)
    with pytest.raises(ValueError, match="found|mixed precision"):
        make_prompt_cache(tiny_qwen3(head_dim=32), mixed)[0].share(36)
    with pytest.raises(ValueError, match="several sequences"):
        H2OKVCache.merge([held()]).share(36)
    with pytest.raises(ValueError, match="this cache holds 0 and"):
        H2OKVCache().share(1)
    cache = held()
    cache.share(np.int64(36))
    assert (cache.prefix_rows, cache.size(), cache.offset) == (36, 40, 40)
    with pytest.raises(ValueError, match="shared rows already"):
        cache.share(10)
    with pytest.raises(ValueError, match=r"keys are .*expected .* H = 2"):
        cache.update_and_fetch(mx.ones((1, 3, 1, 32)), mx.ones((1, 3, 1, 32)))


@pytest.mark.parametrize(
    "given",
    [
        {"max_kv_size": 80},  # of which nothing is kept for good
        {"prompts": [PREFIX, PREFIX[:9] + [1] * 9], **SMALL},
        {"prompts": PROMPTS[:1], **SMALL},
        {"logits_processors": [lambda tokens, logits: logits], **SMALL},
        {**SMALL, **PACKED, "light_bits": 4},
    ],
)
def test_a_batch_that_cannot_share_does_without(given):
    found = answered(tiny_qwen3(head_dim=32), True, count=2, **given)
    assert all(cache.prefix_rows == 0 for one in found.caches for cache in one)


def test_prompt_caches_of_the_caller_are_as_they_are():
    model = tiny_qwen3()
    ready = standing(model)
    prompts = [prompt[LENGTH:] for prompt in PROMPTS]
    found = answered(model, True, prompts, prompt_caches=ready, prefill_step_size=24)
    assert found.caches[0][0]._table.prefix is ready[0][0]._table.prefix
    for prompt, tokens in zip(PROMPTS, found.token_ids, strict=True):
        assert tokens == alone(model, prompt, **SMALL)


def test_without_our_attention_nothing_is_silently_wrong():
    """mlx_lm's own would see nothing of the prefix."""
    model = tiny_qwen3()
    for policy in ("window", "h2o-ema"):
        caches = standing(model, 1, policy=policy)[0]
        assert all(cache.needs_routing for cache in caches)
        with pytest.raises(ValueError, match=r"layer 0 shares its first 48 rows.*routing\(model\)"):
            model(mx.array([[1]]), cache=caches)
    cache = standing(model, 1)[0][0]
    rows = mx.ones((1, 2, 1, 16))
    cache.update_and_fetch(rows, rows)
    with pytest.raises(RuntimeError, match="got no attention .* shares its first 48 rows"):
        cache.update_and_fetch(rows, rows)


def test_a_model_that_changes_the_keys_before_attention_is_refused():
    model = tiny_qwen3()
    cache = standing(model, 1)[0][0]
    rows = mx.ones((1, 2, 1, 16))
    keys, values = cache.update_and_fetch(rows, rows)
    with routing(model), pytest.raises(ValueError, match="computes with the keys"):
        attention = mlx_lm.models.qwen3.scaled_dot_product_attention
        attention(mx.ones((1, 4, 1, 16)), keys + 1, values, cache=cache, scale=1.0, mask=None)


COMMON = [
    ([[1, 2, 3], [1, 2, 4]], 2), ([[1, 2], [1, 2]], 1), ([[1, 2, 3], [1, 2]], 1),
    ([[5, 1], [6, 1]], 0), ([[7, 8, 9]], 2), ([[7], [7, 8]], 0),
    ([[1, 2, 3, 4], [1, 2, 3, 5], [1, 9, 3, 4]], 1),
]  # fmt: skip


@pytest.mark.parametrize(("prompts", "expected"), COMMON)
def test_common_tokens(prompts, expected):
    assert shareable(tiny_qwen3(), [], [PREFIX + own for own in prompts]) == LENGTH + expected
