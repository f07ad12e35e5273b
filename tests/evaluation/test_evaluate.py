"""The measures, against hand-made models and caches and against plain MLX."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_h2o
from mlx_h2o import demo, evaluate

LENGTH, BUDGET = 96, 32


@pytest.fixture(scope="module")
def model_and_tokens() -> tuple[Any, list[int]]:
    model, tokenizer = mlx_h2o.load("demo")
    return model, tokenizer.encode(demo.text(), add_special_tokens=False)[:LENGTH]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 7])
def test_losses_are_those_of_one_forward_pass(
    model_and_tokens: tuple[Any, list[int]], step: int
) -> None:
    model, tokens = model_and_tokens
    run = evaluate.teacher_forced(
        model, make_prompt_cache(model), tokens, first=BUDGET, step=step, chunk=10
    )
    logits = model(mx.array(tokens)[None, :-1])[0, BUDGET - 1 :]
    chosen = mx.take_along_axis(logits, mx.array(tokens[BUDGET:])[:, None], axis=-1)[:, 0]
    expected = mx.logsumexp(logits, axis=-1) - chosen
    assert run.first == BUDGET
    assert mx.allclose(mx.array(run.losses), expected, rtol=1e-3, atol=1e-4)
    assert run.top1 == tuple(mx.argmax(logits, axis=-1).tolist())
    assert evaluate.perplexity(run) == pytest.approx(math.exp(expected.mean().item()), rel=1e-3)


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff"])
def test_bounded_caches_lose_rows_and_predict_differently(
    model_and_tokens: tuple[Any, list[int]], policy: str
) -> None:
    model, tokens = model_and_tokens
    stock = evaluate.teacher_forced(model, make_prompt_cache(model), tokens, first=BUDGET)
    cache = mlx_h2o.make_prompt_cache(model, BUDGET, policy=policy, layers="equal")
    run = evaluate.teacher_forced(model, cache, tokens, first=BUDGET)
    # The last token is predicted, not fed.
    assert evaluate.evicted_rows(cache) == len(cache) * (LENGTH - 1 - BUDGET)
    assert run.losses[0] == pytest.approx(stock.losses[0], abs=1e-4)
    assert run.losses != pytest.approx(stock.losses, abs=1e-3)
    assert evaluate.kv_bytes(cache) == sum(layer.nbytes for layer in cache)


@pytest.mark.slow
def test_recall_leaves_the_cache_as_it_was(model_and_tokens: tuple[Any, list[int]]) -> None:
    class Fact:
        prompt = (5, 6)
        answer = (7,)

    model, tokens = model_and_tokens
    cache = mlx_h2o.make_prompt_cache(model, BUDGET)
    evaluate.prefill(model, cache, tokens)
    for layer in cache:
        layer.flush()
    before = mx.array(cache[0].positions), mx.array(cache[-1].keys)
    evaluate.recall(model, cache, [Fact(), Fact()])
    assert cache[0].offset == LENGTH
    assert mx.array_equal(before[0], cache[0].positions)
    assert mx.array_equal(before[1], cache[-1].keys)


def test_recall_wants_the_whole_answer() -> None:
    """A model that always answers with the next number, and never goes beyond 3."""

    def model(tokens: mx.array, cache: Any) -> mx.array:
        return mx.eye(8)[mx.minimum(tokens + 1, 3)]

    class Fact:
        def __init__(self, *answer: int) -> None:
            self.prompt, self.answer = (0,), answer

    facts = [Fact(1), Fact(1, 2, 3), Fact(2), Fact(1, 2, 4)]
    assert evaluate.recall(model, [], facts) == (True, True, False, False)


def test_agreement_is_over_the_same_places() -> None:
    def run(first: int, *top1: int) -> evaluate.TeacherForced:
        return evaluate.TeacherForced(first=first, losses=(0.0,) * len(top1), top1=top1)

    assert evaluate.top1_agreement(run(4, 1, 2, 3, 4), run(4, 1, 2, 3, 9)) == 0.75
    for other in (run(5, 1, 2), run(4, 1, 2, 3)):
        with pytest.raises(ValueError, match=r"^\[top1_agreement\] 2 places from 4 on, expected"):
            evaluate.top1_agreement(run(4, 1, 2), other)


def test_peak_memory_sees_what_was_freed() -> None:
    held = mx.get_active_memory()
    with evaluate.peak_memory() as peak:
        block = mx.ones((1024, 1024)) + 1
        mx.eval(block)
        del block
    assert peak.bytes - held >= 4 * 1024 * 1024


def test_wrong_arguments_say_what_was_found() -> None:
    with pytest.raises(ValueError, match=r"^\[prefill\] tokens is empty"):
        evaluate.prefill(None, [], [])
    model, _ = mlx_h2o.load("demo")
    for call in (
        lambda: evaluate.prefill(model, [], [1, 4096]),
        lambda: evaluate.teacher_forced(model, [], [1, 4096], first=1),
        lambda: evaluate.recall(model, [], [SimpleNamespace(prompt=[4096], answer=[1])]),
        lambda: evaluate.recall(model, [], [SimpleNamespace(prompt=[1], answer=[4096])]),
    ):
        with pytest.raises(ValueError, match=r"has the token id 4096, expected 0 to 4095"):
            call()
    with pytest.raises(ValueError, match=r"^\[prefill\] chunk is 0"):
        evaluate.prefill(None, [], [1], chunk=0)
    for first in (0, 3):
        with pytest.raises(ValueError, match=rf"^\[teacher_forced\] first is {first}, expected"):
            evaluate.teacher_forced(None, [], [1, 2, 3], first=first)
