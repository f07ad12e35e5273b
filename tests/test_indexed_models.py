"""Models whose layers pick rows by an indexer: its rows and attention's are the same ones."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from mlx_h2o import BatchLinkedH2OCache
from models import tiny

MODELS = ("deepseek_v32", "glm_moe_dsa")


def test_an_indexed_model_evicts_while_its_indexer_picks():
    # A chunk brings more rows than the indexer picks, so that it does pick by slot.
    model = tiny.build("deepseek_v32", index_topk=24)
    caches = mlx_h2o.make_prompt_cache(model, 20)
    tokens = mx.arange(60)[None] % 90 + 1
    with mlx_h2o.routing(model):
        for part in (slice(0, 16), slice(16, 40), *(slice(i, i + 1) for i in range(40, 60))):
            logits = model(tokens[:, part], cache=caches)
            mx.eval(logits)
            assert mx.all(mx.isfinite(logits)).item()
    for cache in caches:
        assert cache.size() <= 20
        assert cache[1].keys.shape[2] == cache.size()
        np.testing.assert_array_equal(np.array(cache[1].positions), np.array(cache[0].positions))


def test_a_budget_beyond_what_the_indexer_picks_is_refused():
    model = tiny.build("deepseek_v32", index_topk=24)
    for settings in ({}, {"speculative": 3}):
        mlx_h2o.make_prompt_cache(model, 24, **settings)
        with pytest.raises(ValueError, match="24 rows by an indexer: found .* = 25"):
            mlx_h2o.make_prompt_cache(model, 25, **settings)


@pytest.mark.parametrize("settings", [{}, {"kv_bits": 8, "kv_group_size": 32}])
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v3", "phi"])
def test_a_saved_cache_of_any_form_goes_on_alike(tmp_path, name, settings):
    model = tiny.build(name, num_hidden_layers=2)
    caches = mlx_h2o.make_prompt_cache(model, 20, **settings)
    tokens = mx.arange(40)[None] % 90 + 1
    with mlx_h2o.routing(model):
        for part in (slice(0, 30), *(slice(i, i + 1) for i in range(30, 36))):
            mx.eval(model(tokens[:, part], cache=caches))
        file = tmp_path / "cache.safetensors"
        mlx_h2o.save_prompt_cache(file, caches, model=model)
        loaded = mlx_h2o.load_prompt_cache(file, model=model)
        assert [type(cache) for cache in loaded] == [type(cache) for cache in caches]
        for step in range(36, 40):
            one, other = (model(tokens[:, step : step + 1], cache=c) for c in (caches, loaded))
            np.testing.assert_array_equal(np.array(one), np.array(other))
        assert sum(c.nbytes for c in loaded) == sum(c.nbytes for c in caches)


def test_latents_are_packed_and_rotary_parts_are_not():
    model = tiny.build("deepseek_v3", num_hidden_layers=1)
    (cache,) = mlx_h2o.make_prompt_cache(model, 20, kv_bits=4, kv_group_size=32)
    with mlx_h2o.routing(model):
        mx.eval(model(mx.arange(12)[None], cache=[cache]))
    words, scales, _ = cache.keys
    assert (words.dtype, words.shape[-1]) == (mx.uint32, 64 * 4 // 32)
    assert scales.shape[-1] == 64 // 32
    assert (cache.values.dtype, cache.values.shape[-1]) == (mx.float32, 32)


def close(found, expected) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=2e-3, atol=2e-4)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("given", [{}, {"kv_bits": 8, "kv_group_size": 32}])
@pytest.mark.parametrize("policy", ["h2o-ema", "keydiff"])
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_an_indexed_model_is_its_sequences(name, policy, given):
    model = tiny.build(name, index_topk=24)
    lengths = (30, 7, 18)
    alone = [mlx_h2o.make_prompt_cache(model, 16, policy=policy, **given) for _ in lengths]
    batch = [caches[0].merge(list(caches)) for caches in zip(*alone, strict=True)]
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 90, 80) for _ in lengths]

    def tokens(place: int, start: int, count: int) -> mx.array:
        return mx.array(texts[place][start : start + count])[None]

    with mlx_h2o.routing(model):
        longest = max(lengths)
        for cache in batch:
            cache.prepare(lengths=list(lengths), right_padding=[longest - n for n in lengths])
        padded = [
            np.pad(text[:n], (0, longest - n)) for text, n in zip(texts, lengths, strict=True)
        ]
        found = model(mx.array(np.stack(padded)), cache=batch)
        mx.eval([cache.state for cache in batch])
        for cache in batch:
            cache.finalize()
        for place, length in enumerate(lengths):
            close(found[place, :length], model(tokens(place, 0, length), cache=alone[place])[0])
        for step in range(20):
            now = [tokens(place, n + step, 1) for place, n in enumerate(lengths)]
            found = model(mx.concatenate(now), cache=batch)
            for place, token in enumerate(now):
                close(found[place], model(token, cache=alone[place])[0])
        for cache in batch:
            cache.filter([2, 0])
        found = model(mx.concatenate([tokens(2, 38, 1), tokens(0, 50, 1)]), cache=batch)
        close(found[1], model(tokens(0, 50, 1), cache=alone[0])[0])
    assert all(cache.size() == 16 for cache in batch)
    assert {type(cache) for cache in batch} == {BatchLinkedH2OCache}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("given", [{}, {"kv_bits": 8, "kv_group_size": 32}])
@pytest.mark.parametrize("policy", ["h2o-ema", "keydiff"])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_of_an_indexed_model_leave_no_trace(name, policy, given):
    model = tiny.build(name, index_topk=24)
    settings = {"policy": policy, "speculative": 3, **given}
    one, other = (mlx_h2o.make_prompt_cache(model, 16, **settings) for _ in range(2))
    rng = np.random.default_rng(1)
    text, seen = rng.integers(1, 90, 200), 30
    with mlx_h2o.routing(model):
        for caches in (one, other):
            mx.eval(model(mx.array(text[:30])[None], cache=caches))
        for accepted in (4, 1, 2, 3, 1, 1, 4, 2):
            part, outs = text[seen : seen + accepted], []
            for caches in (one, other):  # whatever is drafted beside it
                drafts = rng.integers(1, 90, 4 - accepted)
                outs.append(model(mx.array(np.concatenate([part, drafts]))[None], cache=caches))
                for cache in caches:
                    assert cache.trim(len(drafts)) == len(drafts)
            close(outs[0][:, :accepted], outs[1][:, :accepted])
            seen += accepted
    for cache, twin in zip(one, other, strict=True):
        assert cache.offset == twin.offset == seen
        found, expected = (np.sort(np.array(c[0].positions), axis=2) for c in (cache, twin))
        np.testing.assert_array_equal(found, expected)


def test_a_model_drafts_with_linked_caches_in_mlx_lms_own_loop():
    model = tiny.build("deepseek_v32", index_topk=24)
    caches = mlx_h2o.make_prompt_cache(model, 12, policy="h2o-ema", speculative=3)
    caches += mlx_h2o.make_prompt_cache(model, 12, policy="h2o-ema", speculative=3)
    from mlx_lm.generate import speculative_generate_step

    prompt = mx.array(np.random.default_rng(2).integers(1, 90, 20))
    with mlx_h2o.routing(model):
        found = speculative_generate_step(
            prompt, model, model, num_draft_tokens=3, max_tokens=30, prompt_cache=caches
        )
        tokens = [(int(token), drafted) for token, _, drafted in found]
    assert len(tokens) == 30
    assert any(drafted for _, drafted in tokens)
    assert all(cache[0].evicted > 0 for cache in caches)
