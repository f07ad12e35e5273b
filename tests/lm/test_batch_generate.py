"""mlx_lm's own batch generation with evicting caches: each sequence is as it is alone."""

import copy

import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator

from mlx_h2o import BatchH2OKVCache, batch_generate, make_prompt_cache, routing, stream_generate
from routing_checks import SETTINGS
from tiny_models import random_prompt, tiny_gemma3, tiny_qwen3, tiny_tokenizer

pytestmark = [pytest.mark.downstream, pytest.mark.usefixtures("mlx_lm_stays_as_it_is")]

LENGTHS = (30, 3, 17)
PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]


def alone(model, prompt, tokens, **given):
    """Tokens of one sequence by itself, and its caches."""
    caches = make_prompt_cache(model, 16, **SETTINGS | given)
    found = stream_generate(
        model, tiny_tokenizer(), prompt, max_tokens=tokens, prompt_cache=caches, prefill_step_size=8
    )
    return [response.token for response in found][:tokens], caches


def answered(model, tokens=30, **given):
    """All prompts at once, with their tokens and caches."""
    return batch_generate(
        model, tiny_tokenizer(), PROMPTS, max_tokens=tokens, max_kv_size=16, prefill_step_size=8,
        return_prompt_caches=True, return_token_ids=True, draft_model=None, **SETTINGS | given,
    )  # fmt: skip


def kept(cache) -> list[list[int]]:
    return np.sort(np.array(cache.positions)[0], axis=1).tolist()


PACKED = {"kv_bits": 8, "kv_group_size": 32}
MIXED = PACKED | {"light_bits": 4, "dense_size": 2}


@pytest.mark.slow
@pytest.mark.matrix(5)
@pytest.mark.parametrize("rows", [{}, PACKED, MIXED], ids=["dense", "8 bits", "8 and 4"])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff", "tova"])
def test_each_sequence_gets_the_tokens_that_it_gets_alone(policy, heads, rows):
    model, given = tiny_qwen3(kv_heads=heads, head_dim=32), {"policy": policy} | rows
    found = answered(model, **given)
    for prompt, tokens, caches in zip(PROMPTS, found.token_ids, found.caches, strict=True):
        expected, own = alone(model, prompt, 30, **given)
        assert tokens == expected
        for one, other in zip(caches, own, strict=True):
            assert type(one) is type(other)
            # mlx_lm alone runs one token ahead, and its last one is in the cache.
            assert one.size() <= 16 and one.offset == len(prompt) + 30
            assert other.offset - one.offset in (0, 1)
            if other.offset == one.offset:
                assert kept(one) == kept(other)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [{}, MIXED])
def test_sequences_join_and_leave(rows):
    model = tiny_qwen3(head_dim=32)
    caches = [make_prompt_cache(model, 16, **SETTINGS | rows) for _ in range(5)]
    prompts = [random_prompt(5 + 6 * index, seed=index) for index in range(5)]
    limits = [3, 30, 11, 25, 18]
    with routing(model):
        batches = BatchGenerator(
            model, completion_batch_size=3, prefill_batch_size=2, prefill_step_size=8
        )
        uids = batches.insert(prompts[:3], limits[:3], caches[:3])
        tokens, ended = {uid: [] for uid in range(5)}, {}
        for turn in range(400):
            if turn == 12:
                uids += batches.insert(prompts[3:], limits[3:], caches[3:])
            _, responses = batches.next()
            for response in responses:
                tokens[response.uid].append(response.token)
                if response.finish_reason is not None:
                    ended[response.uid] = response.prompt_cache
            held = batches._generation_batch.prompt_cache
            assert all(type(cache) is BatchH2OKVCache and cache.size() <= 16 for cache in held)
            if turn > 12 and len(ended) == 5:
                break
        batches.close()
    for uid, prompt, limit in zip(uids, prompts, limits, strict=True):
        assert tokens[uid] == alone(model, prompt, limit, **rows)[0]
        assert ended[uid][0].size() == min(16, len(prompt) + limit)


def test_a_conversation_goes_on_in_a_batch_and_out_of_it():
    model, tokenizer = tiny_qwen3(), tiny_tokenizer()
    first = batch_generate(
        model, tokenizer, PROMPTS, max_tokens=9, max_kv_size=16, return_prompt_caches=True
    )
    before = [copy.deepcopy(caches) for caches in first.caches]
    turns = [random_prompt(6, seed=5), random_prompt(9, seed=6), random_prompt(2, seed=7)]
    second = batch_generate(
        model, tokenizer, turns, prompt_caches=first.caches, max_tokens=12, return_token_ids=True
    )
    every = zip(turns, before, first.caches, second.token_ids, strict=True)
    for turn, caches, left, tokens in every:
        assert [cache.offset for cache in left] == [cache.offset for cache in caches]
        found = stream_generate(model, tokenizer, turn, max_tokens=12, prompt_cache=caches)
        assert [response.token for response in found][:12] == tokens


def test_mlx_lms_own_function_takes_our_caches_within_the_context():
    model = tiny_qwen3()
    caches = [make_prompt_cache(model, 16, **SETTINGS) for _ in PROMPTS]
    tokenizer = mlx_lm.tokenizer_utils.TokenizerWrapper(tiny_tokenizer())
    with routing(model):
        given = {"max_tokens": 20, "return_token_ids": True, "prefill_step_size": 8}
        found = mlx_lm.batch_generate(model, tokenizer, PROMPTS, caches, **given)
    for prompt, tokens in zip(PROMPTS, found.token_ids, strict=True):
        assert tokens == alone(model, prompt, 20)[0]
    with pytest.raises(RuntimeError, match="qwen3 layer 0 got no scores.*routing"):
        mlx_lm.batch_generate(model, tokenizer, PROMPTS, caches, max_tokens=20)


def test_layers_with_caches_of_other_kinds_in_the_same_batch():
    model = tiny_gemma3()
    found = answered(model, 20)
    for prompt, caches, tokens in zip(PROMPTS, found.caches, found.token_ids, strict=True):
        kinds = [type(cache).__name__ for cache in caches]
        assert kinds == ["RotatingKVCache", "RotatingKVCache", "H2OKVCache"]
        assert caches[2].size() == 16
        assert tokens == alone(model, prompt, 20)[0]


def test_what_does_not_fit_is_refused():
    model, tokenizer = tiny_qwen3(), tiny_tokenizer()
    with pytest.raises(ValueError, match=r"\[batch_generate\] found no prompts"):
        batch_generate(model, tokenizer, [])
    with pytest.raises(ValueError, match=r"\[batch_generate\] found 1 prompt caches, expected 3"):
        batch_generate(model, tokenizer, PROMPTS, [make_prompt_cache(model, 16)])
    with pytest.raises(ValueError, match=r"found prompt_cache and the settings \['max_kv_size'\]"):
        batch_generate(model, tokenizer, PROMPTS[:1], [make_prompt_cache(model)], max_kv_size=8)
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        batch_generate(model, tokenizer, [[1, 2], []])
    mixed = [make_prompt_cache(model, 16), make_prompt_cache(model, 32), make_prompt_cache(model)]
    with pytest.raises(ValueError, match=r"\[BatchH2OKVCache.merge\] found the settings"):
        batch_generate(model, tokenizer, PROMPTS, mixed)
