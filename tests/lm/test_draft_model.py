"""Speculative decoding by mlx_lm's own loop, with evicting caches for both models."""

from itertools import islice

import pytest

from mlx_h2o import H2OConfig, batch_generate, generate, make_prompt_cache, stream_generate
from mlx_h2o.lm.layers import known_probe
from models import tiny
from routing_checks import SETTINGS
from serving.test_serving_snapshots import MADE
from tiny_models import VOCABULARY, random_prompt, stock_tokens, tiny_qwen3, tiny_tokenizer

pytestmark = [pytest.mark.downstream, pytest.mark.usefixtures("mlx_lm_stays_as_it_is")]

PROMPT = random_prompt(20)


def drafting(model, draft, caches, tokens=40):
    given = {"max_tokens": tokens, "draft_model": draft, "num_draft_tokens": 3}
    return stream_generate(model, tiny_tokenizer(), PROMPT, prompt_cache=caches, **given)


def both(model, draft, size, **given):
    settings = SETTINGS | {"speculative": 3} | given
    return make_prompt_cache(model, size, **settings) + make_prompt_cache(draft, size, **settings)


@pytest.mark.slow
@pytest.mark.matrix(2)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("policy", ["h2o-ema", "keydiff"])
def test_below_the_budget_the_tokens_are_those_of_mlx_lm(layers, policy):
    """With a draft model that is mostly wrong, and with one that never is."""
    model, draft = tiny_qwen3(), tiny_qwen3(layers=layers)
    responses = [*drafting(model, draft, both(model, draft, 256, policy=policy))]
    assert [r.token for r in responses][:40] == stock_tokens(model, PROMPT, 40)
    taken = sum(response.from_draft for response in responses)
    assert taken == 30 if layers == 2 else taken < 30


@pytest.mark.slow
def test_the_settings_make_caches_for_both_models():
    of, usual = (tiny_qwen3(), tiny_tokenizer()), {"max_kv_size": 16, **SETTINGS}
    more = {"num_draft_tokens": 2, "speculative": 2}
    each = usual, {"max_kv_size": H2OConfig.of(**usual)}, usual | more
    given = {"max_tokens": 30, "draft_model": tiny_qwen3(layers=1)}
    (text,) = {generate(*of, PROMPT, **given | one) for one in each}
    assert len(text.split()) == 30


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("number", range(3, 8))
def test_the_caches_hold_the_whole_answer(layers, number):
    """Whole or ended by the caller, with a draft model that is mostly wrong, and one never so."""
    model, draft = tiny_qwen3(), tiny_qwen3(layers=layers)
    for tokens in (number, 40):
        caches = both(model, draft, 256)
        said = [one.token for one in islice(drafting(model, draft, caches, tokens), number)]
        assert {one.offset for one in caches} == {len(PROMPT) + number}
        more = [one.token for one in drafting(model, draft, caches, 8)]
        assert more == stock_tokens(model, [*PROMPT, *said, *PROMPT], 8)


def test_a_token_that_the_draft_model_does_not_know_is_not_chosen():
    model, prompt = tiny_qwen3(), [token % 40 for token in PROMPT]
    given = {"draft_model": tiny.build("qwen3", vocab_size=40), "max_tokens": 12}
    found = [one.token for one in stream_generate(model, tiny_tokenizer(), prompt, **given)]
    assert max(stock_tokens(model, prompt, 12)) >= 40 > max(found)


def test_budgets_are_those_of_the_target_model():
    model, draft = tiny_qwen3(), tiny_qwen3(layers=1)
    given = {"max_kv_size": 16, "sink_size": 1, "policy": "keydiff", "budgets": [12, 20]}
    text = generate(model, tiny_tokenizer(), PROMPT, max_tokens=40, draft_model=draft, **given)
    assert len(text.split()) == 40
    caches = make_prompt_cache(model, draft_model=draft, speculative=2, **given)
    assert [one.config.max_kv_size for one in caches] == [12, 20, 16]


def test_a_model_of_the_two_that_shows_no_scores():
    hidden, other = tiny.build("gemma2", vocab_size=VOCABULARY), tiny_qwen3()
    for pair in ((hidden, other), (other, hidden)):
        assert len([*drafting(*pair, both(*pair, 16, policy="keydiff"), tokens=30)]) == 30
        with pytest.raises(ValueError, match=r"\[routing\] gemma2 does not call"):
            next(drafting(*pair, both(*pair, 16)))


@pytest.mark.parametrize(("kind", "most"), [("windows", 23), ("hybrid", 0)])
def test_a_model_that_cannot_take_back_so_many_tokens_is_refused(kind, most):
    """Or its windows would keep drafts that were wrong, without a word. No model is probed."""
    pair = MADE[kind](), tiny_qwen3(seed=9)
    for (model, draft), of in ((pair, "gemma3_text|lfm2"), (pair[::-1], "the draft model")):
        said = f"expected at most {most} with a draft model: the [RA].*Cache of ({of}) cannot take"
        with pytest.raises(ValueError, match=said):
            generate(model, tiny_tokenizer(), PROMPT, max_tokens=4, draft_model=draft)
        assert known_probe(model) is None


def test_caches_that_could_not_take_back_are_refused_at_the_start():
    model, draft = tiny_qwen3(), tiny_qwen3(layers=1)
    for given in ({"speculative": 0}, {"speculative": 2}, {"speculative": 0, "policy": "window"}):
        caches = both(model, draft, 16, **given)
        with pytest.raises(ValueError, match=r"\[stream_generate\] .*speculative=3 or"):
            drafting(model, draft, caches)
        assert all(cache.empty() for cache in caches)
    with pytest.raises(ValueError, match=r"\[batch_generate\] draft_model is given, expected None"):
        batch_generate(model, tiny_tokenizer(), [PROMPT], draft_model=draft)
