"""Memory of caches: no copies at the budget, nothing handed out stays alive, no graph grows."""

import gc
import weakref

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from back_ends import NATIVE
from cache_checks import SCALE, edges, random_tokens, small, step
from cache_columns import COLUMNS, IN_BATCHES, new_cache
from cache_courses import Course, Sequence
from mlx_h2o import H2OConfig, policies

POLICIES = policies.names()
KINDS = ("dense", "8 bits", "8 and 4", "published", "latents")


def of_budget(column: str, policy: str, budget: int, **settings):
    given = {"max_kv_size": budget, "sink_size": 1, "recent_size": 6, "policy": policy}
    return new_cache(H2OConfig.of(**given | COLUMNS[column].settings | settings))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_update_lets_go_of_what_was_handed_out_before(policy):
    """So that MLX may write in place."""
    rng = np.random.default_rng(1)
    cache = small(policy)
    for _ in range(20):
        step(cache, *random_tokens(rng, 1))
    _, keys, values = random_tokens(rng, 1)
    gone = [
        weakref.ref(array) for array in cache.update_and_fetch(mx.array(keys), mx.array(values))
    ]
    cache.update_scores(mx.ones((2, 4, 1, 16)))
    cache.update_and_fetch(mx.array(keys), mx.array(values))
    gc.collect()
    assert all(reference() is None for reference in gone)


@pytest.mark.parametrize("column", ["8 bits", "8 and 4", "arrays", "latents"])
def test_no_unpacked_rows_are_held_after_a_chunk(column):
    """Memory of a long prompt, while the other layers run."""
    cache = of_budget(column, "window", 256, kv_bits=8)
    rows = mx.random.normal((1, 2, 1024, 256))
    cache.update_and_fetch(rows[:, :, :32], rows[:, :, :32])
    mx.eval([array for _, array in tree_flatten([cache.keys, cache.values])])
    mx.clear_cache()
    before = mx.get_active_memory() - cache.nbytes
    handed = cache.update_and_fetch(rows, rows)
    mx.eval(handed)
    del handed
    gc.collect()
    mx.eval([array for _, array in tree_flatten([cache.keys, cache.values])])
    held = mx.get_active_memory() - before - cache.held_nbytes
    assert held < rows.nbytes / 4, f"{held} bytes beside {cache.held_nbytes}"


@NATIVE
@pytest.mark.matrix(16)
@pytest.mark.parametrize("evict_every", [1, 16])
@pytest.mark.parametrize("speculative", [0, 3])
@pytest.mark.parametrize("column", ["dense", "8 bits", "K8 V4", "latents"])
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff"])
def test_tokens_are_written_in_place(policy, column, speculative, evict_every):
    """No second copy of keys or values is made at the budget, nor where rows go."""
    settings = {"evict_every": evict_every, "speculative": speculative, "recent_size": 64}
    cache = of_budget(column, policy, 2048, **settings)
    advance(cache, 2048)
    for _ in range(20):
        advance(cache, 1)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    evicted = cache.evicted
    for _ in range(20):
        advance(cache, 1)
    assert cache.evicted - evicted >= 16
    (_, rows), *_ = tree_flatten([cache.keys])
    # keydiff reads all keys as an array where rows go, which is not the cache's affair.
    if policy != "keydiff":
        # What the newest queries say waits in arrays that are made anew.
        allowed = rows.nbytes if speculative else rows.nbytes / 2
        assert mx.get_peak_memory() - before < allowed


def advance(cache, length: int) -> None:
    """An update, what attention reads of it, and its scores."""
    rows = mx.ones((1, 2, length, 128))
    handed = cache.update_and_fetch(rows, rows)
    read = [array[0, 0, 0, 0] for _, array in tree_flatten(list(handed))]
    if cache.policy.needs_scores:
        cache.update_scores(mx.ones((1, 2, 1, cache.positions.shape[2])), masked=False)
    mx.eval(read, cache.scores)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("column", KINDS)
@pytest.mark.parametrize("policy", ["h2o-ema", "window", "keydiff", "tova", "h2o"])
@pytest.mark.parametrize("budget", [14, 400])
@pytest.mark.parametrize("speculative", [0, 2])
def test_the_graph_of_a_step_does_not_grow(policy, column, budget, speculative):
    """Evaluating the output evaluates positions, scores and pending scores too."""
    cache = of_budget(column, policy, budget, speculative=speculative, evict_every=4)
    sequence = Sequence(cache.config, 1)
    sizes = []
    for index in range(160):
        queries, keys, values = (mx.array(part)[None] for part in sequence.random(1))
        k, v = cache.update_and_fetch(keys, values)
        if column == "latents":  # models read the rotary parts before
            mx.eval(cache.attend(queries, k, k, scale=SCALE), v)
        else:
            mx.eval(cache.attend(queries, k, v, scale=SCALE))
        del k, v
        if index in (62, 158):  # as many tokens after rows went, or left the dense ones
            sizes.append(edges([cache.keys, cache.values, cache.scores, cache.positions]))
    assert sizes[1] <= sizes[0] < 120, sizes


@pytest.mark.parametrize("column", ["dense", "8 bits"])
@pytest.mark.parametrize("policy", ["h2o-ema", "window"])
def test_nothing_hangs_on_the_keys_that_others_evaluate(policy, column):
    """As where attention is not ours: the keys that were handed out bring the rest along."""
    cache = of_budget(column, policy, 14)
    sequence = Sequence(cache.config, 1)
    sizes = []
    for index in range(160):
        _, keys, values = (mx.array(part)[None] for part in sequence.random(1))
        k, v = cache.update_and_fetch(keys, values)
        if policy == "h2o-ema":
            cache.update_scores(mx.ones((1, 4, 1, cache.positions.shape[2])), masked=False)
        handed = [array for _, array in tree_flatten([k, v])]
        # As the routed attention does: the new scores are tied to the output.
        scores = [cache.scores] if cache.policy.needs_scores else []
        mx.eval(mx.depends(handed[0], [*handed[1:], *scores]))
        del k, v, handed
        if index in (62, 158):
            sizes.append(edges([cache.keys, cache.values, cache.scores, cache.positions]))
    assert sizes[1] <= sizes[0] < 120, sizes


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("policy", "column"), IN_BATCHES)
def test_the_graph_of_a_batch_does_not_grow(policy, column):
    course = Course(column, policy, batch=2, evict_every=4)
    course.prompts([10, 4])
    cache, sizes = course.cache, []
    for index in range(130):
        parts = [sequence.random(1) for sequence in course.sequences]
        queries, keys, values = (mx.array(np.stack(part)) for part in zip(*parts, strict=True))
        mask = cache.make_mask(1)
        k, v = cache.update_and_fetch(keys, values)
        mx.eval(cache.attend(queries, k, v, scale=SCALE, mask=mask))
        del k, v
        if index in (62, 126):
            sizes.append(edges([cache.keys, cache.values, cache.scores, cache.positions]))
    assert sizes[1] <= sizes[0] < 250, sizes


def test_room_grows_in_steps_up_to_the_budget():
    cache = small("window", max_kv_size=300)
    keys = mx.zeros((1, 1, 1, 4), mx.float16)
    rooms = set()
    for _ in range(320):
        cache.update_and_fetch(keys, keys)
        rooms.add(cache.nbytes // 16)
    assert len(rooms) <= 4
    assert cache.nbytes == 300 * 16 + 299 * 4  # keys and values, and all positions but the newest
