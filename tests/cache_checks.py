"""Checks of a cache class that the suite runs on the real one, and on ones with seeded faults.

Each takes what it checks as an argument and raises AssertionError.
"""

from __future__ import annotations

import tempfile

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import reference
from mlx_h2o import H2OConfig, H2OKVCache, fast, use_backend
from reference_cache import ReferenceCache

SCALE = 0.25
SHAPE = {"batch": 2, "heads": 2, "group": 2, "size": 16}


def small(policy="h2o", **given) -> H2OKVCache:
    """A cache of 16 rows, 2 sinks and 4 recent, or as given."""
    chosen = {"max_kv_size": 16, "sink_size": 2, "recent_size": 4, "policy": policy} | given
    return H2OKVCache(H2OConfig(**chosen), name="tiny layer 0")


def filled(policy="h2o", tokens=40, **given):
    """A cache that has seen some tokens one by one, and the generator of more."""
    rng = np.random.default_rng(9)
    cache = small(policy, **given)
    for _ in range(tokens):
        step(cache, *random_tokens(rng, 1))
    return cache, rng


def rows_by_position(cache) -> tuple[dict, dict]:
    """Positions of each head, ascending, and C in that order."""
    positions, scores = np.array(cache.positions), np.array(cache.scores)
    found, of = {}, {}
    for head in np.ndindex(*positions.shape[:2]):
        order = np.argsort(positions[head])
        found[head] = positions[head][order].tolist()
        of[head] = scores[head][order].tolist()
    return found, of


def random_tokens(
    rng, length: int, size: int = SHAPE["size"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values of ``length`` tokens, float32."""
    batch, heads, group, _ = SHAPE.values()
    shapes = ((batch, heads * group), (batch, heads), (batch, heads))
    return tuple(rng.standard_normal((*s, length, size)).astype(np.float32) for s in shapes)


def step(cache, queries, keys, values, *, array_mask: bool = False) -> np.ndarray:
    """One update with its attention, as a model makes them."""
    length = keys.shape[2]
    mask = cache.make_mask(length, return_array=array_mask)
    k, v = cache.update_and_fetch(mx.array(keys), mx.array(values))
    if isinstance(k, tuple):
        out, scores = fast.scaled_dot_product_attention_quantized_with_scores(
            mx.array(queries), *k, *v, scale=SCALE, mask=mask, **cache.attention_settings
        )
    else:
        out, scores = fast.scaled_dot_product_attention_with_scores(
            mx.array(queries), k, v, scale=SCALE, mask=mask
        )
    cache.update_scores(scores, masked=mask is not None)
    return np.array(out)


def as_they_come(keys, values):
    """What a store of dense rows makes of new rows."""
    return keys, values


def check_lengths_after_replacements(
    make, policy: str, *, replacements: int = 100, size: int = 16, stored=as_they_come
) -> None:
    """Lq 1 to 8 after many replacements, other slots in every head: the slow reference's output.

    ``stored`` says what the cache makes of new rows when it stores them.
    """
    rng = np.random.default_rng(sum(map(ord, policy)))
    config = H2OConfig(max_kv_size=24, sink_size=2, recent_size=6, policy=policy)
    cache = make(config)
    slow = ReferenceCache(config, SHAPE["batch"], SHAPE["heads"])
    lengths = [20, *[1] * (4 + replacements), *range(1, 9), *[1] * 5]
    for index, length in enumerate(lengths):
        queries, keys, values = random_tokens(rng, length, size)
        slow.update(*stored(keys, values))
        expected = slow.attend(queries, SCALE)
        found = step(cache, queries, keys, values, array_mask=index % 2 == 0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5, err_msg=f"step {index}")
        assert cache.offset == slow.offset
        positions, scores = rows_by_position(cache)
        assert positions == slow.positions(), f"step {index}"
        if policy == "h2o":
            for head, of in slow.scores().items():
                np.testing.assert_allclose(scores[head], of, rtol=1e-4, atol=1e-6)
        if index == 23 + replacements:
            slots = np.array(cache.positions).reshape(-1, config.max_kv_size)
            assert len({tuple(row) for row in slots.tolist()}) > 1 or policy == "window"


def check_trace(caches, config, lengths, scores, keys) -> None:
    """The same rows at every step in all caches and in the reference, ties included.

    ``scores`` [B, Hq, T, T] are whole numbers by position and the decay is 1/2, ``keys`` are
    along the axes: all arithmetic is exact, so every order of rows gives the same C and ranks.
    """
    batch, heads = keys.shape[:2]
    slow = ReferenceCache(config, batch, heads)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        slow.update(keys[:, :, part], keys[:, :, part])
        slow.absorb(scores[:, :, part])
        for cache in caches:
            array = mx.array(keys[:, :, part])
            cache.update_and_fetch(array, array)
            slots = mx.repeat(cache.positions, scores.shape[1] // heads, axis=1)
            slots = mx.broadcast_to(slots[:, :, None], (*slots.shape[:2], length, slots.shape[2]))
            by_slot = mx.take_along_axis(mx.array(scores[:, :, part]), slots, axis=-1)
            cache.update_scores(by_slot)
            positions, found = rows_by_position(cache)
            assert positions == slow.positions()
            if config.policy == "h2o":
                for head, of in slow.scores().items():
                    np.testing.assert_array_equal(found[head], of)
            _check_rows_belong(cache, keys)


def _check_rows_belong(cache, keys) -> None:
    """Each stored key is the one that the sequence had at its position, quantised once or not."""
    stored, given = [cache.keys], [mx.array(keys)]
    if isinstance(cache.keys, tuple):
        stored = cache.keys
        given = mx.quantize(given[0], group_size=cache.group_size, bits=cache.config.kv_bits)
    for part, whole in zip(stored, given, strict=True):
        slots = np.broadcast_to(np.array(cache.positions)[..., None], part.shape)
        expected = np.take_along_axis(np.array(whole), slots, axis=2)
        np.testing.assert_array_equal(np.array(part), expected)


def exact_trace(rng, lengths, *, batch: int = 2, heads: int = 2, group: int = 2, size: int = 4):
    """Scores and keys for ``check_trace``; some scores are masked."""
    total = sum(lengths)
    scores = rng.integers(-4, 5, (batch, heads * group, total, total)).astype(np.float32)
    # Even numbers in pairs of heads: the mean over a group of two is exact too.
    scores = np.where(rng.random(scores.shape) < 0.2, -np.inf, scores).astype(np.float32)
    later = np.arange(total)[None] > np.arange(total)[:, None]
    scores = np.where(later, np.float32(-np.inf), scores)
    axes = rng.integers(0, size, (batch, heads, total))
    keys = np.eye(size, dtype=np.float32)[axes] * rng.choice([-2.0, -1.0, 1.0, 2.0], axes.shape)[
        ..., None
    ].astype(np.float32)
    return scores, keys


def check_accumulate(accumulate) -> None:
    """One and several queries, masked pairs, unscored rows: the reference's moving average."""
    rng = np.random.default_rng(5)
    for length, masked_share in ((1, 0.0), (1, 0.5), (7, 0.0), (7, 0.5), (128, 0.9)):
        before = rng.random((2, 2, 40)).astype(np.float32)
        before[rng.random(before.shape) < 0.4] = np.nan
        scores = (rng.standard_normal((2, 6, length, 40)) * 4).astype(np.float32)
        scores[rng.random(scores.shape) < masked_share] = -np.inf
        expected = reference.accumulate(before, scores, decay=0.95)
        arguments = mx.array(before), mx.array(scores)
        forms = [accumulate(*arguments, decay=0.95)]
        if masked_share == 0:
            forms.append(accumulate(*arguments, decay=0.95, masked=False))
        for found in forms:
            np.testing.assert_allclose(np.array(found), expected, rtol=2e-5, atol=1e-6)


def check_ties(make) -> None:
    """Equal scores: the lower position stays, whether one row goes or several."""
    with use_backend("composed"):
        for evict_every in (1, 3):
            config = H2OConfig(
                max_kv_size=6,
                sink_size=1,
                recent_size=1,
                decay=0.5,
                evict_every=evict_every,
                policy="h2o",
            )
            lengths = [4, *[1] * 12]
            total = sum(lengths)
            scores = np.ones((1, 2, total, total), np.float32)
            keys = np.ones((1, 2, total, 4), np.float32)
            check_trace([make(config)], config, lengths, scores, keys)


def check_graph(
    policy: str, *, budget: int, make=H2OKVCache, size: int = 16, most: int = 80
) -> None:
    """What evaluates the keys evaluates positions and scores: the graph is one step long."""
    rng = np.random.default_rng(2)
    cache = make(H2OConfig(max_kv_size=budget, sink_size=1, recent_size=2, policy=policy))
    sizes = []
    for index in range(300):
        _, keys, values = random_tokens(rng, 1, size)
        k, v = cache.update_and_fetch(mx.array(keys), mx.array(values))
        cache.update_scores(mx.ones((2, 4, 1, cache.positions.shape[2])), masked=False)
        # As the routed attention does: the new scores are tied to the output.
        k, v = ([*rows] if isinstance(rows, tuple) else [rows] for rows in (k, v))
        scores = [cache.scores] if cache.policy.needs_scores else []
        mx.eval(mx.depends(k[0], [*k[1:], *v, *scores]))
        if index in (20, 290):
            arrays = cache.keys, cache.values, cache.scores, cache.positions
            arrays = [array for _, array in tree_flatten(arrays)]
            with tempfile.NamedTemporaryFile("r", suffix=".dot") as file:
                mx.export_to_dot(file.name, *arrays)
                sizes.append(file.read().count("->"))
        del k, v
    assert sizes[0] == sizes[1] < most, f"edges after 20 and 290 steps: {sizes}"
