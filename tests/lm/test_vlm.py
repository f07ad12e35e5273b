"""mlx-vlm with evicting caches: a model family that mlx_lm lacks, and mlx-vlm's prompt cache."""

from typing import Any

import mlx.core as mx
import pytest

import mlx_h2o
from mlx_h2o.lm.routing import evicting_caches
from tiny_models import random_prompt, spread

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed: nox -s vlm", exc_type=ImportError)
vlm: Any = pytest.importorskip("mlx_h2o.vlm")

SETTINGS: dict[str, dict[str, Any]] = {
    "window": {"policy": "window"},
    "keydiff": {"policy": "keydiff"},
    "h2o": {"policy": "h2o"},
    "packed": {"policy": "h2o", "kv_bits": 8, "kv_group_size": 32},
    "codes": {"policy": "window", "kv_format": "turbo4"},
    "by head": {"budgets": [[30, 50], [40, 40]]},
}


@pytest.fixture(scope="module")
def model() -> Any:
    """An Idefics3 of random weights, which mlx_lm does not know."""
    from mlx_vlm.models import idefics3
    from mlx_vlm.models.idefics3.config import ModelConfig, TextConfig, VisionConfig

    mx.random.seed(1)
    text = TextConfig("idefics3", 128, 48, 4, 1e-5, 64, 2, num_hidden_layers=2)
    sight = VisionConfig("idefics3", 32, 2, 14, num_hidden_layers=1, image_size=28)
    found = idefics3.Model(ModelConfig(text, sight, "idefics3", vocab_size=64))
    spread(found.language_model)
    return found


def written(model: Any, tokens: list[int], caches: list[Any], count: int = 8) -> list[int]:
    found, given = [], mx.array([tokens])
    for _ in range(count):
        given = mx.argmax(model.language_model(given, cache=caches).logits[:, -1:], axis=-1)
        found.append(int(given.item()))
    return found


@pytest.mark.parametrize("settings", SETTINGS)
def test_its_prompt_cache_holds_evicting_caches(model: Any, settings: str) -> None:
    from mlx_vlm.apc import APCManager
    from mlx_vlm.apc_adapters import build_prefix_cache_plan
    from mlx_vlm.models.cache import make_prompt_cache

    manager = APCManager(num_blocks=8, block_size=16)
    prompt, more = random_prompt(100), random_prompt(20, seed=4)
    with vlm.evicting(model, max_kv_size=40, **SETTINGS[settings]):
        plan = build_prefix_cache_plan(model)
        assert plan.restorable and plan.strategy == "checkpoint"
        expected = make_prompt_cache(model.language_model)
        written(model, prompt, expected, 1)
        assert manager.store_exact_cache(prompt, expected)
        answer = written(model, more, expected)
        assert all(one.evicted > 0 for one in evicting_caches(expected))
        found, length = manager.lookup_exact_cache(prompt + more)
        assert length == len(prompt) and type(found[0]) is type(expected[0])
        assert written(model, more, found) == answer
    assert not hasattr(model.language_model, "make_cache")


def test_rows_that_stay_are_all_where_all_fit(model: Any) -> None:
    from mlx_vlm.models.cache import make_prompt_cache

    prompt = random_prompt(60)
    stock = written(model, prompt, make_prompt_cache(model.language_model))
    with vlm.evicting(model, max_kv_size=200, policy="h2o"):
        caches = make_prompt_cache(model.language_model)
        assert written(model, prompt, caches) == stock
    assert isinstance(caches[0], mlx_h2o.H2OKVCache) and caches[0].scores is not None


def test_settings_are_checked_and_the_model_is_left_as_it_was(model: Any) -> None:
    with pytest.raises(ValueError, match="max_kv_size"), vlm.evicting(model, max_kv_size=-1):
        pass
    assert not hasattr(model.language_model, "make_cache")
