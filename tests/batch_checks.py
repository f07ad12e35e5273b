"""Sequences fed to a batch and, token by token the same, to a cache of their own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_h2o.caches.quantized_cache import evicting_cache
from mlx_h2o.lm import attention

HEADS, GROUP, SIZE, SCALE = 2, 2, 32, 0.2


class Lone:
    """A sequence of random tokens, and a cache that sees it alone."""

    def __init__(self, config, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shapes = (HEADS * GROUP, HEADS, HEADS)
        self.tokens = [rng.standard_normal((h, 400, SIZE)).astype(np.float32) for h in shapes]
        self.cache = evicting_cache(config)
        self.seen = 0

    def next(self, count: int) -> list[np.ndarray]:
        part = slice(self.seen, self.seen + count)
        self.seen += count
        return [array[:, part] for array in self.tokens]


def attended(cache, queries, keys, values) -> mx.array:
    """One forward of one layer, as routing makes it."""
    length = queries.shape[2]
    mask = cache.make_mask(length)
    k, v = cache.update_and_fetch(mx.array(keys), mx.array(values))
    arguments = {
        "queries": mx.array(queries),
        "keys": k,
        "values": v,
        "cache": cache,
        "scale": SCALE,
        "mask": mask,
    }

    def stock():
        return mx.fast.scaled_dot_product_attention(
            arguments["queries"], k, v, scale=SCALE, mask=mask
        )

    return attention.attend(attention.Call(cache, arguments), stock)


def _alike(batch_out, outs, spans) -> None:
    """The outputs of a sequence's own tokens are finite and those that it gets alone."""
    for place, (out, (start, stop)) in enumerate(zip(outs, spans, strict=True)):
        if stop > start:
            found = np.array(batch_out[place : place + 1, :, start:stop])
            np.testing.assert_allclose(found, np.array(out), rtol=1e-4, atol=2e-5)
    assert np.isfinite(np.array(batch_out)).all()


def chunk(batch, alone, lengths, *, step: int, left: bool = False) -> None:
    """A prompt for each sequence, padded to the longest, in steps, as mlx_lm feeds it."""
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    if any(padding) and not left:
        batch.prepare(lengths=lengths, right_padding=padding)
    rng = np.random.default_rng(longest)
    fed = []
    for one, length, pad in zip(alone, lengths, padding, strict=True):
        sides = [(pad, 0), (0, 0)] if left else [(0, 0), (pad, 0)]
        parts = []
        for array in one.next(length):
            before, after = (
                rng.standard_normal((array.shape[0], side[0], SIZE)).astype(np.float32)
                for side in sides
            )
            parts.append(np.concatenate([before, array, after], axis=1))
        fed.append(parts)
    arrays = [np.stack(parts) for parts in zip(*fed, strict=True)]
    for first in range(0, longest, step):
        end = min(first + step, longest)
        part = [array[:, :, first:end] for array in arrays]
        out = attended(batch, *part)
        outs, spans = [], []
        for place, (one, length, pad) in enumerate(zip(alone, lengths, padding, strict=True)):
            low, high = (pad, longest) if left else (0, length)
            start, stop = (min(max(edge, first), end) - first for edge in (low, high))
            spans.append((start, stop))
            own = [array[place : place + 1, :, start:stop] for array in part]
            outs.append(attended(one.cache, *own) if stop > start else None)
        _alike(out, outs, spans)
        mx.eval(batch.state[:4])
    if any(padding) and not left:
        batch.finalize()


def decode(batch, alone, count: int) -> None:
    """Tokens one by one, all sequences at once."""
    for _ in range(count):
        tokens = [one.next(1) for one in alone]
        out = attended(batch, *(np.stack(parts) for parts in zip(*tokens, strict=True)))
        outs = [
            attended(one.cache, *(part[None] for part in parts))
            for one, parts in zip(alone, tokens, strict=True)
        ]
        _alike(out, outs, [(0, 1)] * len(alone))


def rows_of(cache) -> dict:
    """Of each head, by position: score, key and value."""
    if cache.empty():
        return {}
    cache.size()
    arrays = (cache.positions, cache.scores, *cache._store.dense())
    positions, scores, keys, values = (np.array(array) for array in arrays)
    found = {}
    for b, h in np.ndindex(*positions.shape[:2]):
        slots = {int(p): slot for slot, p in enumerate(positions[b, h])}
        assert min(slots) >= 0
        found[b, h] = {
            p: (scores[b, h, slot], keys[b, h, slot], values[b, h, slot])
            for p, slot in sorted(slots.items())
        }
    return found
