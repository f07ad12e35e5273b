"""A row format that the package does not know: with one new column, a cache does everything.

It follows "A row format" in docs/internals/extending.md, as far as that needs no kernel: several
arrays for each row, which attention gets unpacked.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import H2OConfig, H2OKVCache, load_prompt_cache, save_prompt_cache
from mlx_h2o.caches import formats
from mlx_h2o.caches.column import Column, Parts

SHAPE = (2, 32)  # KV heads and elements of a row


class CodeColumn(Column):
    """3-bit codes, one per byte, of a row over its root mean square."""

    dtype = mx.float32

    def encode(self, rows: mx.array) -> Parts:
        self.dtype = rows.dtype
        exact = rows.astype(mx.float32)
        size = mx.sqrt(mx.mean(mx.square(exact), axis=-1, keepdims=True))
        codes = mx.clip(mx.round(exact / size * 1.5 + 3.5), 0, 7)
        return codes.astype(mx.uint8), size

    def decode(self, parts: Parts) -> mx.array:
        codes, size = parts
        return ((codes.astype(mx.float32) - 3.5) / 1.5 * size).astype(self.dtype)


def rounded(rows: mx.array) -> mx.array:
    column = CodeColumn()
    return column.decode(column.encode(rows))


Life = Callable[[Callable[[mx.array], mx.array]], list[np.ndarray]]


def check(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of codes lives as a dense one that is given the rows that the codes stand for."""
    expected = life(rounded)
    # The line of caches/formats.py that a new format takes.
    monkeypatch.setattr(formats, "columns", lambda *_: [(CodeColumn(), CodeColumn())])
    found = life(lambda rows: rows)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def fed(
    cache: H2OKVCache,
    lengths: Sequence[int],
    change: Callable[[mx.array], mx.array],
    batch: int = 1,
) -> list[np.ndarray]:
    """Attention after each update, and at last what is stored, by position."""
    key, found = mx.random.key(len(lengths)), []
    heads, width = SHAPE
    for length in lengths:
        key, *own = mx.random.split(key, 4)
        shapes = ((batch, heads), (batch, heads), (batch, 2 * heads))
        keys, values, queries = (
            mx.random.normal((*shape, length, width), key=one)
            for shape, one in zip(shapes, own, strict=True)
        )
        mask = cache.make_mask(length)
        rows = cache.update_and_fetch(change(keys), change(values))
        found.append(np.array(cache.attend(queries, *rows, scale=0.2, mask=mask)))
    return [*found, np.sort(np.array(cache.positions), axis=2)]


def config(policy: str = "h2o-ema", **settings: Any) -> H2OConfig:
    return H2OConfig.of(max_kv_size=16, sink_size=2, recent_size=5, policy=policy, **settings)


@pytest.mark.parametrize("policy", ["h2o-ema", "keydiff", "value-aware"])
@pytest.mark.parametrize("evict_every", [1, 4])
def test_steps_and_chunks(policy, evict_every, monkeypatch):
    settings, lengths = config(policy, evict_every=evict_every), (7, 12, *[1] * 9, 20, *[1] * 9)
    check(lambda change: fed(H2OKVCache(settings), lengths, change), monkeypatch)


def test_batches_copies_and_files(monkeypatch, tmp_path):
    def life(change):
        caches = [H2OKVCache(config()) for _ in range(2)]
        found = fed(caches[0], (20, 1, 1), change) + fed(caches[1], (5,), change)
        batch = H2OKVCache.merge(caches)
        found += fed(batch, [1] * 8, change, batch=2)
        alone = batch.extract(1)
        found += fed(copy.deepcopy(alone), (1, 3), change)
        save_prompt_cache(str(tmp_path / "rows.safetensors"), [alone])
        (read,) = load_prompt_cache(str(tmp_path / "rows.safetensors"))
        batch.filter(mx.array([0]))
        return found + fed(read, (1, 3, 1), change) + fed(batch, (1,), change)

    check(life, monkeypatch)
