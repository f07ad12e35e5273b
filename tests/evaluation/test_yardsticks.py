"""The real models are what they were converted from: perplexity, and a sentence, of each.

`nox -s yardsticks` fetches them.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import generate

from fetched_models import loaded
from mlx_h2o import demo

pytestmark = pytest.mark.real

TOKENS = 512
PERPLEXITIES = {
    "smollm2-135m-instruct": 47.97,
    "smollm2-135m-biased": 48.0,  # what is added to all keys alike changes next to nothing
    "gemma3-270m": 47.56,
}
SENTENCES = {
    "smollm2-135m-instruct": ("What is the capital of France?", "The capital of France is Paris."),
    "smollm2-135m-biased": ("What is the capital of France?", "The capital of France is Paris."),
    "gemma3-270m": (
        "The capital of France is",
        " the capital of the country of France. It is the largest city in France",
    ),
}


def perplexity(model: Any, tokenizer: Any) -> float:
    """Of the beginning of the text in the package, read at once."""
    tokens = mx.array([tokenizer.encode(demo.text())[:TOKENS]])
    logits = model(tokens)[0, :-1].astype(mx.float32)
    return math.exp(nn.losses.cross_entropy(logits, tokens[0, 1:]).mean().item())


@pytest.mark.parametrize("name", PERPLEXITIES)
def test_perplexity_and_a_greedy_sentence_are_as_read(name: str) -> None:
    model, tokenizer = loaded(name)
    assert perplexity(model, tokenizer) == pytest.approx(PERPLEXITIES[name], rel=0.01)
    prompt, expected = SENTENCES[name]
    if tokenizer.has_chat_template:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )
    assert generate(model, tokenizer, prompt, max_tokens=24).startswith(expected)
