"""Seeded faults in the host code: each is caught by the checks that the suite runs.

A fault is a change of the source text. The changed module is loaded beside the real one and put
in its place for one check, which passes before and must fail then.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cache_checks import (
    check_accumulate,
    check_graph,
    check_lengths_after_replacements,
    check_ties,
    check_trace,
    exact_trace,
)
from mlx_h2o import H2OConfig, H2OKVCache, fast, use_backend
from mlx_h2o.lm.replacements import Replacements
from routing_checks import everything_of_mlx_lm
from tiny_models import tiny_qwen3

routing_module = importlib.import_module("mlx_h2o.lm.routing")


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in a module, of which ``names`` go where they are used."""

    what: str
    module: str
    old: str
    new: str
    names: tuple[tuple[str, str], ...]
    check: Callable[[], None]


def rows_of_h2o():
    check_lengths_after_replacements(H2OKVCache, "h2o")


def rows_of_keydiff():
    check_lengths_after_replacements(H2OKVCache, "keydiff")


def moving_average():
    with use_backend("composed"):
        check_accumulate(fast.accumulate_scores)


def composed_rows_of_h2o():
    with use_backend("composed"):
        rows_of_h2o()


def ties():
    check_ties(H2OKVCache)


def chunks():
    lengths = [1, 9, 1, 1, 1, 5, 1]
    config = H2OConfig(
        max_kv_size=6, sink_size=1, heavy_size=2, recent_size=3, decay=0.5, policy="h2o"
    )
    scores, keys = exact_trace(np.random.default_rng(11), lengths)
    check_trace([H2OKVCache(config)], config, lengths, scores, keys)


def graph():
    check_graph("window", budget=400)


def mlx_lm_is_put_back():
    model = tiny_qwen3()
    before = everything_of_mlx_lm()
    with pytest.MonkeyPatch.context() as patch:
        # Counts of its own: a fault must not reach the tests that follow.
        patch.setattr(routing_module, "PATCHES", Replacements())
        with routing_module.routing(model), routing_module.routing():
            pass
    after = everything_of_mlx_lm()
    changed = [key for key, value in after.items() if before.get(key) is not value]
    for module, name in changed:
        if (module, name) in before:
            setattr(sys.modules[module], name, before[module, name])
        else:
            delattr(sys.modules[module], name)
    assert not changed


FAULTS = [
    Fault(
        "the recent window is off by one",
        "caches.eviction",
        "start = self.offset + self.added - self.recent_size",
        "start = self.offset + self.added - self.recent_size + 1",
        (("mlx_h2o.caches.bounded", "Eviction"),),
        rows_of_h2o,
    ),
    Fault(
        "the recent window of a surplus reaches beyond the sequence",
        "caches.bounded",
        "self._compact(self._store, self.config.max_kv_size, 0)",
        "self._compact(self._store, self.config.max_kv_size, 2)",
        (("BoundedRows", "_settle"),),
        chunks,
    ),
    Fault(
        "masked pairs decay",
        "operations.ema",
        "return result if unmasked is None else mx.where(unmasked, result, importance)",
        "return result",
        (("mlx_h2o.operations.composed_cache", "ema"),),
        moving_average,
    ),
    Fault(
        "the first score is not set but averaged with 0, as the paper does",
        "operations.ema",
        "mx.where(mx.isnan(importance), new, ",
        "mx.where(mx.isnan(importance), (1 - decay) * new, ",
        (("mlx_h2o.operations.composed_cache", "ema"),),
        moving_average,
    ),
    Fault(
        "the queries of a chunk are averaged in the wrong order",
        "operations.ema",
        "(mx.expand_dims(count, 2) - so_far)",
        "(so_far - 1)",
        (("mlx_h2o.operations.composed_cache", "ema"),),
        moving_average,
    ),
    Fault(
        "the offset follows the physical length",
        "caches.bounded",
        "self.offset += keys.shape[2]",
        "self.offset = self._store.length",
        (("BoundedRows", "update_and_fetch"),),
        rows_of_keydiff,
    ),
    Fault(
        "the mask is made for the logical length",
        "caches.cache",
        "min(self._store.length, self.config.max_kv_size)",
        "self.offset",
        (("H2OKVCache", "make_mask"),),
        rows_of_keydiff,
    ),
    Fault(
        "a replaced row inherits the score of the evicted one",
        "operations.composed_cache",
        "importance = mx.put_along_axis(request.importance, slots, nan, axis=2)",
        "importance = request.importance",
        (("mlx_h2o.operations.composed_cache", "marked"),),
        composed_rows_of_h2o,
    ),
    Fault(
        "ties go to the higher position",
        "operations.composed",
        "place = ((1 << _POSITION_BITS) - 1) - place",
        "place = place",
        (("mlx_h2o.operations.composed", "retention_key"),),
        ties,
    ),
    Fault(
        "positions are not tied to the keys",
        "caches.bounded",
        "keys = tied(keys, [self._store.positions, self._store.importance, *beside])",
        "keys = keys[...]",
        (("BoundedRows", "keys_and_values"),),
        graph,
    ),
    Fault(
        "the last context to close puts nothing back",
        "lm.replacements",
        "if replaced.users == 0:",
        "if replaced.users < 0:",
        (("Replacements", "_drain"),),
        mlx_lm_is_put_back,
    ),
]


def loaded_from_text(fault: Fault, patch: pytest.MonkeyPatch, *, seeded: bool):
    """The module, loaded a second time from its text, with the fault or without."""
    real = importlib.import_module(f"mlx_h2o.{fault.module}")
    source = Path(real.__file__).read_text()
    assert source.count(fault.old) == 1, f"{real.__file__} does not hold once: {fault.old}"
    changed = source.replace(fault.old, fault.new)
    assert changed != source
    name = f"{real.__name__}_again"
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader=None))
    module.__package__ = real.__package__
    patch.setitem(sys.modules, name, module)  # dataclasses look themselves up
    text = changed if seeded else source
    exec(compile(text, f"{real.__file__}, again", "exec"), vars(module))
    return module


def put_in_place(fault: Fault, patch: pytest.MonkeyPatch, *, seeded: bool) -> None:
    """Methods go into the real class, other names into the modules that use them."""
    module = loaded_from_text(fault, patch, seeded=seeded)
    real = importlib.import_module(f"mlx_h2o.{fault.module}")
    for holder, name in fault.names:
        if hasattr(real, holder):
            patch.setattr(getattr(real, holder), name, vars(getattr(module, holder))[name])
        else:
            value = module if name == fault.module.rpartition(".")[2] else getattr(module, name)
            patch.setattr(importlib.import_module(holder), name, value)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_suite_catches(fault, monkeypatch):
    with monkeypatch.context() as patch:
        put_in_place(fault, patch, seeded=False)
        fault.check()  # loading a module twice breaks nothing: the fault alone is to blame
    with monkeypatch.context() as patch:
        put_in_place(fault, patch, seeded=True)
        with pytest.raises((AssertionError, ValueError)) as caught:
            fault.check()
    print(f"{fault.what}: {caught.value!r:.120}")
    fault.check()
