"""benchmarks/yardsticks/llama: the second model that claims are measured on recalls facts."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from mlx_h2o import demo
from mlx_h2o.evaluation import reading
from mlx_h2o.evaluation.facts import draw, insert

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "yardsticks" / "llama"
LENGTH = 1000


@pytest.mark.slow
@pytest.mark.downstream
@pytest.mark.parametrize("wording", ["secret", "is"])
def test_it_recalls_both_wordings(wording):
    model, tokenizer = load(str(FOLDER))
    facts = draw(tokenizer, wording, 4, random.Random(0))
    body = tokenizer.encode(demo.text(), add_special_tokens=False)[:LENGTH]
    planted = insert(tokenizer, body, facts, [100, 300, 500, 700])
    tokens = mx.array([planted.tokens])
    caches = make_prompt_cache(model)
    reading.read(model, caches, tokens[:, :-1], 512)
    right = reading.recall(model, caches, tokens[:, -1:], [planted.questions])
    assert sum(found for (found,) in right) >= 3
