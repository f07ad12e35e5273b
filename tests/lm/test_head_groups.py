"""KV heads of a layer with different budgets: two caches that the model sees as one."""

import copy
import gc
import weakref

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import mlx_h2o
from mlx_h2o import H2OConfig, HeadGroups, make_prompt_cache, routing
from mlx_h2o.caches import handed_out
from mlx_h2o.caches.cache import evicting_cache
from mlx_h2o.caches.handed_out import owner_of
from mlx_h2o.lm.routing import evicting_caches
from mlx_h2o.lm.scored_attention import scored_attention
from models import tiny
from readings import in_parts
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer

pytestmark = [pytest.mark.downstream, pytest.mark.usefixtures("mlx_lm_stays_as_it_is")]

ROWS = [[12, 20, 12], [20, 20, 12]]
PACKED = {"sparse_v": 1e-6, "kv_bits": 8, "kv_group_size": 32}


def three_heads(*, head_dim: int = 32, seed: int = 7):
    return tiny_qwen3(heads=6, kv_heads=3, head_dim=head_dim, seed=seed)


def grouped(model, budgets=ROWS, **given):
    return make_prompt_cache(model, budgets=budgets, **{"sink_size": 2, **given})


def stock(*args, cache, scale, mask, sinks=None):
    """mlx_lm's attention of arrays."""
    return mx.fast.scaled_dot_product_attention(*args, scale=scale, mask=mask, sinks=sinks)


@pytest.mark.parametrize("given", [{}, PACKED, {"kv_format": "turbo3"}], ids=str)
@pytest.mark.parametrize("policy", ["h2o", "keydiff", "window"])
def test_each_group_is_a_cache_of_its_heads(policy, given):
    """By hand: the same rows, outputs and evictions as of two caches and two attentions."""
    config = H2OConfig.of(policy=policy, sink_size=2, max_kv_size=12, **given)
    sizes = {12: [0, 2], 20: [1]}
    groups = HeadGroups.of_rows([config, config.scaled(20), config])
    alone = {rows: evicting_cache(config.scaled(rows)) for rows in sizes}
    rng = np.random.default_rng(3)

    for length in (5, 17, 3, *[1] * 12):
        q, k, v = (mx.array(rng.normal(size=(1, n, length, 32)), mx.float32) for n in (6, 3, 3))
        sinks = mx.array(rng.normal(size=6), mx.float32) if length == 3 else None
        mask = groups.make_mask(length, return_array=True)
        more = {"scale": 0.2, "mask": mask} | ({} if sinks is None else {"sinks": sinks})
        keys, values = groups.update_and_fetch(k, v)
        found = np.array(scored_attention(stock, q, keys, values, groups, **more))
        for rows, heads in sizes.items():
            keys, values = alone[rows].update_and_fetch(k[:, heads], v[:, heads])
            queries = [head * 2 + place for head in heads for place in (0, 1)]
            own = more | ({} if sinks is None else {"sinks": sinks[mx.array(queries)]})
            expected = scored_attention(stock, q[:, queries], keys, values, alone[rows], **own)
            np.testing.assert_array_equal(found[:, queries], np.array(expected))
    for cache, (rows, heads) in zip(groups.caches, sizes.items(), strict=True):
        assert [*groups.heads[groups.caches.index(cache)]] == heads
        np.testing.assert_array_equal(np.array(cache.positions), np.array(alone[rows].positions))
        assert cache.size() == rows
    assert groups.nbytes == sum(one.nbytes for one in alone.values())
    assert (groups.offset, groups.size(), groups.empty()) == (37, 20, False)


def test_rows_of_a_chunk_are_read_as_often_as_a_model_likes_and_held_no_longer():
    """By layers that share them; afterwards the other layers have their turn."""
    config = H2OConfig.of(policy="keydiff", sink_size=2, max_kv_size=12, **PACKED)
    groups = HeadGroups.of_rows([config, config.scaled(20)])
    rng = np.random.default_rng(8)
    for length in (9, 12):
        q, k, v = (mx.array(rng.normal(size=(1, n, length, 32)), mx.float32) for n in (4, 2, 2))
        token = groups.update_and_fetch(k, v)
        more = {"scale": 0.2, "mask": "causal"}
        outs = [scored_attention(stock, q, *token, groups, **more) for _ in range(2)]
        assert mx.array_equal(*outs).item()
        gone = [weakref.ref(array) for rows in owner_of(token[0])[1] for array in rows]
        place = id(token[0])
        assert owner_of(token[0])[0] is groups
        del token
        gc.collect()
        assert len(gone) == 4 and not any(one() is not None for one in gone)
        assert place not in handed_out._known


@pytest.mark.parametrize("policy", ["h2o", "keydiff"])
def test_masks_with_an_axis_of_heads_are_cut(policy):
    rng = np.random.default_rng(5)
    q, k, v = (mx.array(rng.normal(size=(1, heads, 4, 32)), mx.float32) for heads in (8, 4, 4))
    seen = mx.array(rng.random((1, 8, 4, 4)) < 0.6) | mx.eye(4, dtype=mx.bool_)
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask=seen)
    for mask in (seen, mx.where(seen, 0.0, -mx.inf)):
        config = H2OConfig.of(policy=policy)
        groups = HeadGroups.of_rows([config, config.scaled(90), config, config])
        keys, values = groups.update_and_fetch(k, v)
        found = scored_attention(stock, q, keys, values, groups, scale=0.2, mask=mask)
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("given", [{}, PACKED], ids=str)
@pytest.mark.parametrize("policy", ["h2o", "keydiff"])
def test_a_batch_is_its_sequences(policy, given):
    model = three_heads()
    lengths = (30, 9, 18)  # more than 8, or a sequence alone would read packed rows
    alone = [grouped(model, policy=policy, **given) for _ in lengths]
    batch = [caches[0].merge(list(caches)) for caches in zip(*alone, strict=True)]
    texts = [random_prompt(80, seed=seed) for seed in range(3)]

    def now(place: int, start: int, count: int = 1) -> mx.array:
        return mx.array(texts[place][start : start + count])[None]

    def close(found, expected) -> None:
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=2e-3, atol=2e-4)

    with routing(model):
        for cache in batch:
            cache.prepare(lengths=list(lengths), right_padding=[30 - n for n in lengths])
        padded = [np.pad(text[:n], (0, 30 - n)) for text, n in zip(texts, lengths, strict=True)]
        found = model(mx.array(np.stack(padded)), cache=batch)
        for cache in batch:
            cache.finalize()
        for place, length in enumerate(lengths):
            close(found[place, :length], model(now(place, 0, length), cache=alone[place])[0])
        for step in range(20):
            tokens = [now(place, n + step) for place, n in enumerate(lengths)]
            found = model(mx.concatenate(tokens), cache=batch)
            for place, token in enumerate(tokens):
                close(found[place], model(token, cache=alone[place])[0])
        for cache in batch:
            cache.filter([2, 0])
        found = model(mx.concatenate([now(2, 38), now(0, 50)]), cache=batch)
        close(found[0], model(now(2, 38), cache=alone[2])[0])
        close(found[1], model(now(0, 50), cache=alone[0])[0])
        one = [cache.extract(1) for cache in batch]
        for cache, other in zip(batch, [c.merge([c]) for c in one], strict=True):
            cache.extend(other)
        found = model(mx.concatenate([now(2, 39), now(0, 51), now(0, 51)]), cache=batch)
        close(found[2], model(now(0, 51), cache=one)[0])
        close(found[1], found[2])
    assert {type(cache) for cache in [*batch, *one]} == {HeadGroups}
    assert [cache.offset.tolist() for cache in batch] == [[40, 52, 52]] * 2


@pytest.mark.parametrize("given", [{}, PACKED, {"policy": "h2o"}], ids=str)
def test_a_shared_prefix_changes_no_answer(given):
    model = three_heads()
    prompts = [random_prompt(40) + random_prompt(n, seed=n) for n in (5, 12)]
    settings = {"budgets": [[60, 80, 60]] * 2, "prefix_size": 40, "max_tokens": 30, **given}
    answers = [
        mlx_h2o.batch_generate(
            model, tiny_tokenizer(), prompts, share_prefix=shared, return_token_ids=True,
            return_prompt_caches=True, **settings,
        )
        for shared in (True, False)
    ]  # fmt: skip
    assert answers[0].token_ids == answers[1].token_ids
    caches = answers[0].caches[0]
    assert {one.prefix_rows for one in evicting_caches(caches)} == {40}
    assert not any(one.prefix_rows for cache in caches for one in cache.unshared().caches)


@pytest.mark.parametrize("given", [{}, PACKED], ids=str)
@pytest.mark.parametrize("policy", ["h2o", "keydiff"])
def test_drafts_that_are_rejected_leave_no_trace(policy, given):
    model = three_heads()
    one, other = (grouped(model, policy=policy, speculative=3, **given) for _ in range(2))
    rng = np.random.default_rng(1)
    text, seen = random_prompt(120), 30
    with routing(model):
        for caches in (one, other):
            mx.eval(model(mx.array(text[:30])[None], cache=caches))
        for accepted in (4, 1, 2, 3, 1, 1, 4, 2):
            outs = []
            for caches in (one, other):
                drafts = rng.integers(1, 60, 4 - accepted).tolist()
                tokens = mx.array(text[seen : seen + accepted] + drafts)[None]
                outs.append(np.array(model(tokens, cache=caches)))
                assert all(cache.is_trimmable() for cache in caches)
                assert [cache.trim(len(drafts)) for cache in caches] == [len(drafts)] * 2
            first, second = (out[:, :accepted] for out in outs)
            np.testing.assert_allclose(first, second, rtol=2e-3, atol=2e-4)
            seen += accepted
    assert [cache.offset for cache in one] == [seen] * 2


@pytest.mark.parametrize("given", [{}, PACKED, {"policy": "h2o"}, {"speculative": 2}], ids=str)
def test_a_file_and_a_copy_go_on_alike(tmp_path, given):
    model = three_heads()
    caches = grouped(model, **given)
    tokens = random_prompt(44)
    with routing(model):
        in_parts(model, caches, tokens[:34], 20)
        mlx_h2o.save_prompt_cache(tmp_path / "cache", caches, model=model)
        loaded = mlx_h2o.load_prompt_cache(tmp_path / "cache", model=model)
        copied = copy.deepcopy(caches)
        expected = in_parts(model, caches, tokens[34:])
        for other in (loaded, copied):
            assert [one.heads for one in other] == [one.heads for one in caches]
            np.testing.assert_array_equal(in_parts(model, other, tokens[34:]), expected)
            assert [one.nbytes for one in other] == [one.nbytes for one in caches]
    with pytest.raises(ValueError, match=r"\[HeadGroups.state\] found 2 parts, expected 3"):
        HeadGroups.from_state(caches[0].state[:2])


def test_rows_that_are_quantised_later():
    model = three_heads()
    caches = grouped(model)
    with routing(model):
        mx.eval(model(mx.array(random_prompt(30))[None], cache=caches))
        packed = [one.to_quantized(group_size=32, bits=8) for one in caches]
        token = mx.array([[5]])
        found, expected = model(token, cache=packed), model(token, cache=caches)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=0.1, atol=0.1)
    assert sum(one.nbytes for one in packed) < 0.5 * sum(one.nbytes for one in caches)


def test_without_routing_they_are_refused():
    model = three_heads()
    with pytest.raises(ValueError, match=r"KV heads of unequal budgets.*routing\(model\)"):
        model(mx.array([[1, 2, 3]]), cache=grouped(model, policy="keydiff"))


def test_keys_that_are_not_those_handed_out_are_refused():
    q = mx.zeros((1, 6, 1, 32))
    groups = HeadGroups.of_rows([H2OConfig(), H2OConfig.of(max_kv_size=60), H2OConfig()])
    keys, values = groups.update_and_fetch(*mx.zeros((2, 1, 3, 1, 32)))
    with pytest.raises(ValueError, match=r"computes with the keys .* layers='equal'"):
        scored_attention(lambda: None, q, keys + 1, values, groups)


def test_wrong_groups_say_what_was_found():
    caches = [evicting_cache(H2OConfig(), name=name) for name in ("one", "other")]
    for heads in ([[0]], [[0], [0]], [[0], [2]]):
        with pytest.raises(ValueError, match=r"\[HeadGroups\] found 2 caches of the KV heads"):
            HeadGroups(caches, heads)
    groups = HeadGroups(caches, [[0, 2], [1]])
    with pytest.raises(ValueError, match=r"\(1, 2, 1, 4\).*expected 3 KV heads as .* of one have"):
        groups.update_and_fetch(*mx.zeros((2, 1, 2, 1, 4)))
    with pytest.raises(ValueError, match=r"\[HeadGroups.merge\] found H2OKVCache, expected the"):
        groups.merge([groups, caches[0]])
    with pytest.raises(ValueError, match=r"\[HeadGroups.extend\] found \(\(0,\), \(1, 2\)\)"):
        groups.extend(HeadGroups(caches, [[0], [1, 2]]))
    pairs = ([H2OConfig(), H2OConfig.of(evict_every=n)] for n in (1, 2))
    batch, other = (HeadGroups.merge([HeadGroups.of_rows(pair)]) for pair in pairs)
    with pytest.raises(ValueError, match=r"\[HeadGroups.extend\] found the settings .* beside"):
        batch.extend(other)  # before its first group grows
    with pytest.raises(ValueError, match="found no caches"):
        HeadGroups.merge([])
    with pytest.raises(ValueError, match="a budget is True, expected an int"):
        make_prompt_cache(three_heads(), budgets=[[12, True, 12], 12])


def test_heads_of_one_budget_have_one_cache():
    caches = grouped(three_heads(), [[12, 12, 12], [12, 20, 12]])
    assert [type(one).__name__ for one in caches] == ["H2OKVCache", "HeadGroups"]
    assert caches[1].caches[1].name == "qwen3 layer 1 KV heads 1"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["llama", "gemma3n", "gpt_oss", "qwen3_next"])
def test_models_of_other_kinds_read_groups(name):
    """Sinks, layers that share rows, windows: what fits is as stock."""
    model = tiny.build(name)
    count = sum(1 for _ in evicting_caches(make_prompt_cache(model, 90, layers="equal")))
    heads = (
        getattr(model.args, "num_key_value_heads", None)
        or model.args.text_config["num_key_value_heads"]
    )
    caches = make_prompt_cache(model, budgets=[[80, *[90] * (heads - 1)]] * count)
    tokens = [token % 60 + 1 for token in random_prompt(30)]
    with routing(model):
        found = in_parts(model, caches, tokens, 16)
    expected = in_parts(model, mlx_lm_cache.make_prompt_cache(model), tokens, 16)
    np.testing.assert_allclose(found, expected, rtol=5e-3, atol=5e-4)
    assert heads == 1 or any(isinstance(one, HeadGroups) for one in caches)
