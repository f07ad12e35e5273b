"""Small caches, fed with random tokens as by a model, and checks that several suites use.

Each check takes its subject as an argument and raises AssertionError.
"""

import tempfile

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_h2o import H2OConfig, H2OKVCache, fast

SCALE = 0.25
SHAPE = {"batch": 2, "heads": 2, "group": 2, "size": 16}


def small(policy="h2o-ema", **given) -> H2OKVCache:
    """A cache of 16 rows, with 2 sinks and 4 recent rows, that evicts row by row; or as given."""
    chosen = {"max_kv_size": 16, "sink_size": 2, "recent_size": 4, "evict_every": 1}
    return H2OKVCache(H2OConfig.of(**chosen | {"policy": policy} | given), name="tiny layer 0")


def filled(policy="h2o-ema", tokens=40, **given):
    """A cache that has seen some tokens one by one, and the random generator for more."""
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


def same_states(one, other) -> None:
    """Check that caches have the same types and states."""
    for a, b in zip(one, other, strict=True):
        assert type(a) is type(b)
        found, expected = (tree_flatten(each.state) for each in (a, b))
        for (name, x), (expected_name, y) in zip(found, expected, strict=True):
            assert name == expected_name
            np.testing.assert_array_equal(np.array(x), np.array(y))


def random_tokens(
    rng, length: int, size: int = SHAPE["size"], batch: int = SHAPE["batch"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values of ``length`` tokens, float32."""
    _, heads, group, _ = SHAPE.values()
    shapes = ((batch, heads * group), (batch, heads), (batch, heads))
    return tuple(rng.standard_normal((*s, length, size)).astype(np.float32) for s in shapes)


def step(cache, queries, keys, values, *, array_mask: bool = False) -> np.ndarray:
    """One update and its attention, with the scores passed to the cache."""
    mask = cache.make_mask(keys.shape[2], return_array=array_mask)
    k, v = cache.update_and_fetch(mx.array(keys), mx.array(values))
    bias = cache.row_bias
    given = {"scale": SCALE, "mask": mask}
    if bias is not None:
        given["row_bias"] = bias[:, :, : cache.positions.shape[2]]
    if isinstance(k, tuple):
        out, scores = fast.scaled_dot_product_attention_quantized_with_scores(
            mx.array(queries), *k, *v, **given, **cache._table.tail.packing
        )
    else:
        out, scores = fast.scaled_dot_product_attention_with_scores(
            mx.array(queries), k, v, **given
        )
    cache.update_scores(scores, masked=mask is not None)
    return np.array(out)


def address(array: mx.array) -> int:
    """The address of its first byte."""
    return np.asarray(array.view(mx.uint8)).__array_interface__["data"][0]


def edges(arrays) -> int:
    """The number of inputs of all pending operations that these arrays depend on."""
    found = [array for _, array in tree_flatten(arrays)]
    with tempfile.NamedTemporaryFile("r", suffix=".dot") as file:
        mx.export_to_dot(file.name, *found)
        return file.read().count("->")
