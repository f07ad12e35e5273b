"""The row that attention names goes exactly where a search would have found it."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_h2o import H2OConfig, H2OKVCache, use_backend
from mlx_h2o.caches.quantized_cache import QuantizedH2OKVCache
from mlx_h2o.operations import native
from mlx_h2o.stores.known_worst import KnownWorst, Zones

BACKENDS = ["composed"] if native.unavailable_reason() else ["composed", "native"]
SHAPE = (2, 2, 32)  # B, H, D

STEPS = st.lists(
    st.sampled_from(["token"] * 6 + ["chunk", "again", "assign", "reset", "copy", "masked"]),
    min_size=8,
    max_size=24,
)


class Twins:
    """Two caches that are fed the same; one of them always searches."""

    def __init__(self, seed: int, **options) -> None:
        self.rng = np.random.default_rng(seed)
        config = H2OConfig(max_kv_size=8, sink_size=1, policy="h2o", **options)
        kind = QuantizedH2OKVCache if config.kv_bits else H2OKVCache
        self.caches = [kind(config), kind(config)]
        self.used = 0

    def normal(self, *shape: int) -> mx.array:
        # Few different values: ties are common.
        return mx.array(self.rng.integers(-2, 3, shape).astype(np.float32))

    def feed(self, length: int, *, again: bool = False, masked: bool = False) -> None:
        batch, heads, size = SHAPE
        new = [self.normal(batch, heads, length, size) for _ in "kv"]
        queries = [self.normal(batch, 2 * heads, length, size) for _ in range(1 + again)]
        mask = None
        rows = []
        for cache in self.caches:
            rows.append(cache.update_and_fetch(*new))
        count = self.caches[0].positions.shape[2]
        if masked:
            mask = mx.array(self.rng.random((batch, 1, length, count)) < 0.5)
        elif length > 1:
            mask = "causal"
        for query in queries:
            outputs = [
                cache.attend(query, *both, scale=0.3, mask=mask)
                for cache, both in zip(self.caches, rows, strict=True)
            ]
            self.caches[1]._store.known = None
            mx.eval(outputs)
            assert mx.array_equal(*outputs, equal_nan=True)

    def step(self, what: str) -> None:
        first, second = self.caches
        if what == "assign":
            for cache in self.caches:
                cache.keys = -cache.keys
        elif what == "reset":
            for cache in self.caches:
                cache.reset_scores()
        elif what == "copy":
            self.caches = [copy.deepcopy(first), copy.deepcopy(second)]
        else:
            known = first._store.known
            self.feed(3 if what == "chunk" else 1, again=what == "again", masked=what == "masked")
            self.used += known is not None
        for one, other in zip(
            (first.positions, first.scores), (second.positions, second.scores), strict=True
        ):
            np.testing.assert_array_equal(np.array(one), np.array(other))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"kv_bits": 8, "kv_group_size": 32}], ids=["dense", "8"])
@settings(max_examples=25, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 2**16))
def test_both_ways_keep_the_same_rows_at_every_step(backend, options, steps, seed):
    if options:
        steps = [step for step in steps if step != "assign"]
    with use_backend(backend):
        twins = Twins(seed, **options)
        twins.feed(8)
        for step in [*steps, "token", "token"]:
            twins.step(step)
        assert twins.used > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_known_row_is_used_once(backend, monkeypatch):
    with use_backend(backend):
        twins = Twins(0)
        twins.feed(8)
        store = twins.caches[0]._store
        asked = []
        holds = KnownWorst.holds
        monkeypatch.setattr(
            KnownWorst, "holds", lambda *call: asked.append(holds(*call)) or asked[-1]
        )
        for _ in range(4):
            twins.feed(1)
        # The first token finds no name: a chunk was before it.
        assert asked == [True] * len(asked)
        assert len(asked) >= 3
        assert store.known is not None


def test_what_changed_since_is_searched_again():
    rows, slots = mx.zeros((1, 1, 4)), mx.zeros((1, 1), mx.uint32)
    positions = mx.arange(4)[None, None].astype(mx.int32)
    known = KnownWorst(slots, rows, positions, Zones(1, 3))
    assert known.holds(rows, positions, Zones(1, 3))
    assert not known.holds(rows + 0, positions, Zones(1, 3))
    assert not known.holds(rows, positions + 0, Zones(1, 3))
    assert not known.holds(rows, positions, Zones(1, 4))
    assert not known.holds(rows, positions, Zones(0, 3))
