"""Generation with evicting caches: loading, arguments, equality with stock mlx_lm, refusals."""

from functools import partial
from io import StringIO
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import mlx_lm.models.cache as mlx_lm_cache
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_h2o import generate, load, make_prompt_cache, policies, routing, stream_generate
from mlx_h2o.lm.prompt_cache import rows_held
from mlx_h2o.lm.routing import context_length
from readings import in_parts
from tiny_models import random_prompt, stock_tokens, tiny_llama, tiny_qwen3, tiny_tokenizer

PROMPT = 40
GENERATED = 60
# Float32 logits of up to about 20; what was seen is 2e-5.
TOLERANCE = 1e-4
MODELS = {"tiny qwen3": tiny_qwen3, "tiny llama": tiny_llama, "demo": lambda: load("demo")[0]}


# At a budget of at least the length


def teacher_forced(model, caches, tokens) -> np.ndarray:
    """Logits of every token: the prompt in chunks, the rest one by one."""
    with routing(model):
        return np.array(in_parts(model, caches, tokens, 16, 16, PROMPT - 32)[0])


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", MODELS)
def test_unbounded_equals_stock(name):
    """On stock mlx_lm's own tokens: the same logits, and the same token wherever stock is sure."""
    model = MODELS[name]()
    prompt = [1 + token % 60 for token in range(PROMPT)]
    tokens = prompt + stock_tokens(model, prompt, GENERATED)
    expected = teacher_forced(model, mlx_lm_cache.make_prompt_cache(model), tokens)
    assert expected.dtype == np.float32
    top = np.sort(expected, axis=-1)[:, -2:]
    sure = top[:, 1] - top[:, 0] > TOLERANCE
    assert sure.mean() > 0.9
    for more, policy in enumerate(policies.names()):
        caches = make_prompt_cache(model, len(tokens) + more, policy=policy)
        found = teacher_forced(model, caches, tokens)
        assert rows_held(caches)[1] == 0
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        assert (found.argmax(axis=-1) == expected.argmax(axis=-1))[sure].all()


# Arguments


@pytest.mark.parametrize(("kind", "dtype"), [("gpu", mx.float16), ("cpu", mx.float32)])
def test_load_knows_the_demo_and_upcasts_on_a_cpu(kind, dtype, monkeypatch):
    """And the context of a file that mlx_lm does not keep among the settings."""
    device = SimpleNamespace(type=getattr(mx.DeviceType, kind))
    monkeypatch.setattr(mx, "default_device", lambda: device)
    unsaid = {"max_position_embeddings": None, "n_positions": 64}
    model, tokenizer, _ = load("demo", None, unsaid, None, False, True)
    weights, under_way = [weight for _, weight in tree_flatten(model.parameters())], StringIO()
    assert {weight.dtype for weight in weights} == {dtype}
    mx.export_to_dot(under_way, *weights)  # which another thread could not go on with
    assert "AsType" not in under_way.getvalue()
    assert context_length(model) == 64
    assert tokenizer.decode(tokenizer.encode("a garden")).strip() == "a garden"
    assert len(load("demo", return_config=True)) == 3


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "a/b/c", "model.gguf"])
def test_load_says_that_a_directory_is_missing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match=rf"\[load\] {name} is not a directory, expected one that"):
        load(name)


def test_a_stock_cache_may_be_given():
    model = tiny_qwen3()
    caches = mlx_lm_cache.make_prompt_cache(model)
    text = generate(model, tiny_tokenizer(), random_prompt(20), max_tokens=10, prompt_cache=caches)
    assert text == mlx_lm.generate(model, tiny_tokenizer(), random_prompt(20), max_tokens=10)


@pytest.mark.parametrize("function", [generate, stream_generate])
def test_what_is_refused(function):
    model, tokenizer = tiny_qwen3(), tiny_tokenizer()
    caches = make_prompt_cache(model, 16)
    call, name = partial(function, model, tokenizer, [1, 2, 3]), function.__name__
    with pytest.raises(ValueError, match=rf"\[{name}\] quantized_kv_start is 5000, expected 0"):
        call(kv_bits=8, quantized_kv_start=5000)
    with pytest.raises(ValueError, match=rf"\[{name}\] found prompt_cache and .*'max_kv_size'"):
        call(prompt_cache=caches, max_kv_size=8)
    with pytest.raises(ValueError, match=r"\[H2OConfig\] policy is 'lru'"):
        call(policy="lru")
    # mlx_lm's own arguments of no effect here are let through.
    text = call(max_tokens=2, kv_bits=None, draft_model=None, num_draft_tokens=2)
    assert "".join(getattr(part, "text", part) for part in text)
