"""What mlx_lm's callers do with a prompt cache, done with each kind of ours."""

from copy import deepcopy
from functools import partial

import mlx.core as mx
import mlx_lm
import mlx_lm.models.cache as mlx_lm_cache
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, maybe_quantize_kv_cache, stream_generate
from mlx_lm.models.base import create_attention_mask

import mlx_h2o
from cache_checks import same_states
from mlx_h2o import load_prompt_cache, make_prompt_cache, routing
from models import tiny
from routing_checks import SETTINGS
from tiny_models import random_prompt, tiny_qwen3, tiny_tokenizer

pytestmark = [pytest.mark.downstream, pytest.mark.usefixtures("mlx_lm_stays_as_it_is")]

KINDS = {
    "dense": {},
    "window": {"policy": "window"},
    "quantised": {"kv_bits": 8, "kv_group_size": 32},
    "mixed": {"kv_bits": 8, "light_bits": 4, "kv_group_size": 32, "dense_size": 2},
    "speculative": {"speculative": 2},
    "speculative quantised": {"speculative": 2, "kv_bits": 8, "kv_group_size": 32},
}
PROMPT = random_prompt(30)


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def model():
    return tiny_qwen3(head_dim=32)


def steps(model, prompt, caches, count, **given) -> list[int]:
    with routing(model):
        given |= {"max_tokens": count, "prompt_cache": caches}
        return [int(token) for token, _ in generate_step(mx.array(prompt), model, **given)]


def test_a_prompt_in_two_parts_is_a_prompt(model, kind):
    """A saved prefix, and what follows, at the same chunk boundary."""
    whole, parts = (make_prompt_cache(model, 16, **(SETTINGS | kind)) for _ in range(2))
    expected = steps(model, PROMPT, whole, 12, prefill_step_size=10)
    with routing(model):
        for first in (0, 10):
            mx.eval(model(mx.array(PROMPT[first : first + 10])[None], cache=parts))
            mx.eval([cache.state for cache in parts])
    assert steps(model, PROMPT[20:], parts, 12, prefill_step_size=10) == expected


def test_saving_between_turns(model, kind, tmp_path):
    caches = make_prompt_cache(model, 16, **(SETTINGS | kind))
    steps(model, PROMPT, caches, 5)
    file = str(tmp_path / "cache.safetensors")
    mlx_lm_cache.save_prompt_cache(file, caches, {"turn": "1"})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"turn": "1"}
    same_states(loaded, caches)
    assert [type(cache) for cache in loaded] == [type(cache) for cache in caches]
    assert steps(model, [5, 6, 7], loaded, 8) == steps(model, [5, 6, 7], caches, 8)


def test_trimming_what_was_not_evicted(model, kind):
    caches = make_prompt_cache(model, 64, **kind)
    steps(model, PROMPT, caches, 5)
    assert mlx_lm_cache.can_trim_prompt_cache(caches)
    assert mlx_lm_cache.trim_prompt_cache(caches, 4) == 4
    assert {(cache.offset, cache.size()) for cache in caches} == {(31, 31)}
    assert mlx_lm_cache.trim_prompt_cache(caches, 100) == 31
    assert {(cache.offset, cache.size()) for cache in caches} == {(0, 0)}
    again = steps(model, PROMPT, caches, 5)
    assert again == steps(model, PROMPT, make_prompt_cache(model, 64, **kind), 5)


def test_the_store_of_prompts(model, kind):
    store = mlx_lm_cache.LRUPromptCache(max_size=2)
    for index in range(3):
        caches = make_prompt_cache(model, 16, **(SETTINGS | kind))
        prompt = random_prompt(20, seed=index)
        steps(model, prompt, caches, 0)
        store.insert_cache("model", prompt, caches)
    assert len(store) == 2
    assert store.nbytes > 0
    found, rest = store.fetch_nearest_cache("model", [*prompt, 1, 2])
    assert rest == [1, 2]
    same_states(found, caches)
    store.trim_to(n_bytes=0)
    assert (len(store), store.nbytes) == (0, 0)


def test_members_that_are_probed(model, kind):
    caches = make_prompt_cache(model, 16, **(SETTINGS | kind))
    cache = caches[0]
    assert (cache.empty(), cache.size(), cache.nbytes, cache.offset) == (True, 0, 0, 0)
    hidden = mx.zeros((1, 5, 32))
    assert create_attention_mask(hidden, cache) == "causal"
    assert create_attention_mask(hidden, cache, return_array=True).shape == (5, 5)
    assert create_attention_mask(hidden[:, :1], cache) is None
    maybe_quantize_kv_cache(caches, quantized_kv_start=0, kv_group_size=64, kv_bits=None)
    assert caches[0] is cache
    steps(model, PROMPT, caches, 3)
    assert not cache.empty()
    assert cache.nbytes > 0
    leaves = [leaf for _, leaf in tree_flatten(cache.state)]
    assert all(isinstance(leaf, mx.array | int | float | bool | str | None) for leaf in leaves)
    assert cache  # `if cache and ...`: an object whose length is 0 would be skipped


def test_samplers_processors_and_progress(model, kind):
    seen, progress = [], []

    def watching(tokens, logits):
        seen.append(len(tokens))
        return logits

    caches = make_prompt_cache(model, 16, **(SETTINGS | kind))
    steps(
        model, PROMPT, caches, 6, prefill_step_size=10, logits_processors=[watching],
        sampler=lambda logits: mx.argmax(logits, axis=-1),
        prompt_progress_callback=lambda done, total: progress.append((done, total)),
    )  # fmt: skip
    assert seen == [30, 31, 32, 33, 34, 35, 36]  # it runs one token ahead
    assert progress == [(0, 30), (10, 30), (20, 30), (29, 30), (30, 30)]


@pytest.mark.slow
def test_a_generation_that_is_left_early(model, kind):
    caches = make_prompt_cache(model, 16, **(SETTINGS | kind))
    with routing(model):
        for index, _ in enumerate(
            stream_generate(model, tiny_tokenizer(), PROMPT, 100, prompt_cache=caches)
        ):
            if index == 10:
                break
    left = caches[0].offset
    assert 40 <= left <= 43
    assert len(steps(model, [1, 2, 3], caches, 5)) == 5
    assert caches[0].offset == left + 3 + 5


# Programs that make no caches: mlx_lm's own loop evicts while a context is open


@pytest.mark.parametrize(
    "build", [tiny_qwen3, pytest.param(lambda: tiny.build("deepseek_v2"), marks=pytest.mark.slow)]
)
def test_plain_mlx_lm_evicts_and_then_does_not(build):
    model = build()
    tokens = mx.array([random_prompt(40)]) % 60

    def generated():
        steps = mlx_lm.stream_generate(model, tiny_tokenizer(), tokens[0], max_tokens=30)
        return [response.token for response in steps]

    plain = generated()
    with mlx_h2o.evicting(model, max_kv_size=20, sink_size=2, policy="h2o-sum"):
        caches = mlx_lm_cache.make_prompt_cache(model)
        assert all(type(cache) is mlx_h2o.H2OKVCache for cache in caches)
        assert caches[0].config.policy.name == "h2o-sum"
        mx.eval(model(tokens, cache=caches))
        for cache in caches:
            cache.flush()
        assert {cache.size() for cache in caches} == {20}
        assert {cache.size() for cache in mlx_lm_cache.make_prompt_cache(model)} == {0}
        assert len(generated()) == len(plain)
        with pytest.raises(ValueError, match="no plain KVCache"), mlx_h2o.evicting(model):
            pass
    assert type(mlx_lm_cache.make_prompt_cache(model)[0]) is mlx_lm_cache.KVCache
    assert generated() == plain


def test_one_context_at_a_time_for_a_model():
    model = tiny_qwen3()
    stock = mlx_lm_cache.make_prompt_cache(model)
    model.make_cache = own = partial(deepcopy, stock)
    one, other = (mlx_h2o.evicting(model, max_kv_size=rows) for rows in (20, 30))
    with one, pytest.raises(ValueError, match=r"^\[evicting\] qwen3 is in one already"), other:
        pass
    assert model.make_cache is own
    with pytest.raises(ValueError, match=r"^\[evicting\] draft_model is given, expected"):
        mlx_h2o.evicting(model, max_kv_size=20, draft_model=model)


def test_what_cannot_be_served_changes_nothing():
    model = tiny_qwen3()
    with pytest.raises(ValueError, match="policy"), mlx_h2o.evicting(model, policy="best"):
        pass
    assert type(mlx_lm_cache.make_prompt_cache(model)[0]) is mlx_lm_cache.KVCache
