"""Checks that mlx_lm is unchanged after every context, and tools of the routing tests."""

import contextlib
import gc
import importlib
import sys
import types

import mlx_lm.models.base

from mlx_h2o import stream_generate
from tiny_models import random_prompt, tiny_llama, tiny_qwen3, tiny_tokenizer

tiny_qwen3(), tiny_llama()  # so that their imports precede all tests
SETTINGS = {"policy": "h2o-ema", "sink_size": 1, "recent_size": 4}


def everything_of_mlx_lm() -> dict[tuple[str, str], object]:
    """Every global of every loaded mlx_lm module."""
    return {
        (name, attribute): value
        for name, module in list(sys.modules.items())
        if name == "mlx_lm" or name.startswith("mlx_lm.")
        for attribute, value in vars(module).items()
    }


def replaced_since(before: dict[tuple[str, str], object]) -> set[tuple[str, str]]:
    """The globals of mlx_lm that are others now, and names that are new."""
    now = everything_of_mlx_lm()
    modules = {module for module, _ in before}
    new = {key for key in now.keys() - before.keys() if key[0] in modules}
    return new | {key for key, value in before.items() if now[key] is not value}


def order_of_globals() -> dict[str, list[str]]:
    return {
        name: list(vars(module))
        for name, module in list(sys.modules.items())
        if name.startswith("mlx_lm.")
    }


@contextlib.contextmanager
def mlx_lm_stays_as_it_is():
    """Check that each global is the same object afterwards."""
    before, order = everything_of_mlx_lm(), order_of_globals()
    yield
    gc.collect()
    after = everything_of_mlx_lm()
    # Submodules imported in the meantime are bound in their packages.
    modules = {key for key, value in after.items() if isinstance(value, types.ModuleType)}
    assert not replaced_since(before) - (modules - before.keys())
    now = order_of_globals()
    assert all(now[name][: len(names)] == names for name, names in order.items())
    # By its name in the source, because it takes over the name of the original.
    codes = (getattr(value, "__code__", None) for value in after.values())
    assert not any("_routed" in code.co_qualname for code in codes if code)


def patched(module) -> bool:
    """Whether the module's attention is a replacement, which names the function it wraps."""
    return hasattr(vars(module)["scaled_dot_product_attention"], "__wrapped__")


qwen3 = importlib.import_module("mlx_lm.models.qwen3")
llama = importlib.import_module("mlx_lm.models.llama")
base = mlx_lm.models.base


def stream(model, tokens=200, **given):
    """Responses with a budget of 16 rows."""
    settings = {"max_kv_size": 16, **SETTINGS, **given}
    prompt = random_prompt(20)
    return stream_generate(model, tiny_tokenizer(), prompt, max_tokens=tokens, **settings)
