"""The real models match their originals: the perplexity, and one sentence, of each.

`nox -s yardsticks` fetches them.
"""

import math
import tomllib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import generate

from fetched_models import loaded
from mlx_h2o import demo

pytestmark = pytest.mark.real

TOKENS = 512
READ = tomllib.loads(Path(__file__).with_name("yardsticks.toml").read_text("ascii"))


def perplexity(model: Any, tokenizer: Any) -> float:
    """Perplexity of the beginning of the text in the package, read at once."""
    tokens = mx.array([tokenizer.encode(demo.text())[:TOKENS]])
    logits = model(tokens)[0, :-1].astype(mx.float32)
    return math.exp(nn.losses.cross_entropy(logits, tokens[0, 1:]).mean().item())


@pytest.mark.parametrize("name", READ)
def test_perplexity_and_a_greedy_sentence_are_as_read(name: str) -> None:
    model, tokenizer = loaded(name)
    assert perplexity(model, tokenizer) == pytest.approx(READ[name]["perplexity"], rel=0.01)
    prompt = READ[name]["prompt"]
    if tokenizer.has_chat_template:
        asked = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    assert generate(model, tokenizer, prompt, max_tokens=24).startswith(READ[name]["answer"])
