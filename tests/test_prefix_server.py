"""A server whose prompts begin alike reads and holds that beginning once."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_h2o import H2OConfig, demo, generate, load, make_prompt_cache
from mlx_h2o.lm.serving import server_targets
from prefix_checks import LENGTH, PREFIX, PROMPTS, SMALL, merged, ran
from routing_checks import mlx_lm_stays_as_it_is
from test_server import serving
from tiny_models import random_prompt, tiny_qwen3

__all__ = ["mlx_lm_stays_as_it_is"]  # a fixture around every test

pytestmark = pytest.mark.downstream


class Prompts:
    """mlx_lm's store of prompts, as far as it is asked here."""

    def __init__(self) -> None:
        self.kept: dict[tuple, list] = {}

    def fetch_nearest_cache(self, model, tokens):
        fitting = [key for key in self.kept if tuple(tokens[: len(key)]) == key]
        if not fitting:
            return None, tokens
        longest = max(fitting, key=len)
        return copy.deepcopy(self.kept[longest]), tokens[len(longest) :]

    def insert_cache(self, model, tokens, caches, **given):
        self.kept[tuple(tokens)] = caches


def prompts_of_a_server(model, **given):
    config = H2OConfig(**SMALL | given)
    made = []

    def make(model):
        made.append(make_prompt_cache(model, config))
        return made[-1]

    targets = server_targets(config, None, lambda model: "", lambda *models: None, make)
    wraps = {target.name: target.wrap for target in targets}
    provider_class = wraps["ModelProvider"](
        type("Provider", (), {"load": lambda self: None, "draft_model": None})
    )
    prompts = wraps["LRUPromptCache"](Prompts)()
    provider = provider_class()
    provider.model, provider.model_key = model, "key"
    provider.cli_args = SimpleNamespace(prefill_step_size=24)
    provider.load()
    return prompts, made


def test_prompts_of_a_server_that_begin_alike_are_read_once():
    model = tiny_qwen3()
    prompts, made = prompts_of_a_server(model)
    count = len(made)
    found = [prompts.fetch_nearest_cache("key", prompt) for prompt in PROMPTS]
    assert len(made) == count + 1
    assert [rest for _, rest in found] == [prompt[LENGTH:] for prompt in PROMPTS]
    assert len({id(caches[0]._prefix) for caches, _ in found}) == 1
    assert merged([caches for caches, _ in found])[0].prefix_rows == LENGTH
    # A prompt that is no longer than that, or begins otherwise, or holds parts of an image.
    assert prompts.fetch_nearest_cache("key", PREFIX[:20]) == (None, PREFIX[:20])
    other, rest = prompts.fetch_nearest_cache("key", [*PREFIX[::-1], 1])
    assert rest == [1] and other[0]._prefix is not found[0][0][0]._prefix
    image = [object(), *PROMPTS[0]]
    assert prompts.fetch_nearest_cache("key", image) == (None, image)
    assert prompts.fetch_nearest_cache("another model", PROMPTS[0])[0] is not None  # what is kept


def test_a_shorter_prompt_that_is_held_is_read_on():
    model = tiny_qwen3()
    prompts, _ = prompts_of_a_server(model)
    caches = make_prompt_cache(model, **SMALL)
    ran(model, caches, [PREFIX[:20]])
    prompts.insert_cache("key", PREFIX[:20], caches)
    found, rest = prompts.fetch_nearest_cache("key", PROMPTS[0])
    assert (found[0].prefix_rows, found[0].offset) == (LENGTH, LENGTH)
    fresh = make_prompt_cache(model, **SMALL)
    expected = ran(model, fresh, [PROMPTS[0]])[:, -1]
    np.testing.assert_allclose(ran(model, found, [rest])[:, -1], expected, rtol=1e-3, atol=1e-3)


def test_a_server_says_that_it_cannot_share(caplog):
    prompts, _ = prompts_of_a_server(tiny_qwen3(), kv_bits=8, light_bits=4)
    assert prompts.fetch_nearest_cache("key", PROMPTS[0]) == (None, PROMPTS[0])
    assert "prompts share no rows: layer 0 has mixed precision" in caplog.text
    prompts, made = prompts_of_a_server(tiny_qwen3(), prefix_size=8)
    assert prompts.fetch_nearest_cache("key", PROMPTS[0]) == (None, PROMPTS[0]) and not made


def test_a_server_says_once_that_a_text_is_longer_than_the_model_is_made_for(caplog):
    model = tiny_qwen3()
    model.args.max_position_embeddings = 60
    prompts, _ = prompts_of_a_server(model)
    for length, said in ((60, 0), (61, 1), (70, 1)):
        caches = make_prompt_cache(model, **SMALL)
        ran(model, caches, [random_prompt(length)])
        prompts.insert_cache("key", [], caches)
        assert caplog.text.count("tokens, and the model is made for 60: ") == said
    assert "mlx_h2o server: The text has 61 tokens" in caplog.text


@pytest.mark.slow
def test_answers_of_a_server_are_those_alone(tmp_path):
    """Asked side by side, by texts that go on for longer than the budget."""
    model, tokenizer = load("demo")
    tokens = tokenizer.encode(demo.text())
    prompts = [tokenizer.decode(tokens[:100] + tokens[at : at + 50]) for at in (300, 500, 700)]
    settings = {"max_kv_size": 112, "prefix_size": 64, "layers": "equal"}
    flags = "--max-kv-size 112 --prefix-size 64 --sink-size 4 --layers equal"
    with serving(tmp_path, flags) as server:
        with ThreadPoolExecutor() as asking:
            answers = list(asking.map(lambda prompt: server.ask(prompt, max_tokens=24), prompts))
        log = server.log.read_text()
    assert "share no rows" not in log
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = generate(model, tokenizer, prompt, max_tokens=24, **settings)
        assert answer["choices"][0]["text"].strip() == expected.strip()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
