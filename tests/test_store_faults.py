"""Seeded faults in the stores of packed rows: each is caught by the checks that the suite runs."""

from __future__ import annotations

import mlx.core as mx
import pytest

import test_cache_faults as faults
import test_mixed_cache as mixed
import test_quantized_cache as quantised
import test_quantized_routing as routed
from mlx_h2o import H2OConfig, use_backend


def quantised_reference():
    quantised.test_lengths_1_to_8_equal_the_reference_of_rows_rounded_once("h2o", 8, 4, 64)


def gathered():
    """Compaction and replacement hold the same packed rows, each with its own value."""
    make = quantised.quantised(8, 4, 32)
    caches = [make(H2OConfig(max_kv_size=12, recent_size=4, evict_every=k)) for k in (1, 3)]
    rng = quantised.np.random.default_rng(1)
    tokens = [quantised.random_tokens(rng, 1, quantised.SIZE) for _ in range(12 + 3)]
    for cache in caches:
        for token in tokens:
            quantised.step(cache, *token)
    found = []
    for cache in caches:
        k, v = cache._store.dense()
        order = mx.argsort(cache.positions, axis=2)[..., -4:, None]
        found.append([mx.take_along_axis(rows, order, axis=2) for rows in (k, v)])
    for one, other in zip(*found, strict=True):
        assert mx.array_equal(one, other).item()


def outside_of_routing():
    try:
        routed.test_policies_without_scores_are_right_outside_of_routing("window", None)
    except TypeError as error:  # how mlx_lm fails
        raise AssertionError(f"mlx_lm cannot read the rows: {error}") from error


def graph_of_the_output():
    mixed.test_no_graph_hangs_on_the_output("h2o", 400)


def merged_with_sinks():
    mixed.test_segments_merge_to_attention_over_one_array(3, "bool", True)


def merged_where_all_is_masked():
    with use_backend("composed"):
        mixed.test_segments_merge_to_attention_over_one_array(3, "all masked", False)


def codes():
    mixed.test_recoded_rows_keep_the_upper_bits_or_all(8, 4, mx.float32)


def codes_given_more_space():
    mixed.test_rows_that_were_given_more_space_come_back_as_they_were(4, 8, mx.float32)


def halves():
    mixed.test_at_the_budget_the_newest_are_dense_and_the_rest_in_halves("h2o", "8 and 4 by rank")


def composed_tiers():
    with use_backend("composed"):
        mixed.test_a_row_gets_the_bits_of_its_rank_when_it_leaves()


FAULTS = [
    faults.Fault(
        "values stay where they are in a gather",
        "stores.quantized_store",
        "self.values = each(lambda part: gathered(part, slots), self.values)",
        "self.values = each(lambda part: part[:, :, : slots.shape[2]], self.values)",
        (("QuantizedRowStore", "keep"),),
        gathered,
    ),
    faults.Fault(
        "rows are written one slot further",
        "stores.quantized_store",
        "slots = mx.arange(start, end, dtype=mx.uint32)",
        "slots = mx.arange(start + 1, end + 1, dtype=mx.uint32)",
        (("QuantizedRowStore", "append"),),
        quantised_reference,
    ),
    faults.Fault(
        "bits are there while arrays are handed out",
        "caches.quantized_cache",
        "if self._store is not None and self._store.hands_arrays(self._length):",
        "if False:",
        (("QuantizedH2OKVCache", "bits"),),
        outside_of_routing,
    ),
    faults.Fault(
        "a leaving row ranks by the wrong side",
        "stores.tier_replacement",
        "above = ranks[:, :, packed : packed + 1] > mx",
        "above = ranks[:, :, packed : packed + 1] < mx",
        (("mlx_h2o.stores.tier_replacement", "_two_tiers"),),
        composed_tiers,
    ),
    faults.Fault(
        "a row that sinks leaves its position behind",
        "stores.tier_replacement",
        "(worst, mx.where(sinks, sinking, worst)),",
        "",
        (("mlx_h2o.stores.tier_replacement", "_two_tiers"),),
        composed_tiers,
    ),
    faults.Fault(
        "positions are not tied to the newest rows",
        "stores.mixed_store",
        "keys = tied(keys, [self.positions, self.importance])",
        "pass",
        (("MixedRowStore", "segments"),),
        graph_of_the_output,
    ),
    faults.Fault(
        "no row leaves after a chunk",
        "stores.mixed_store",
        "newest = min(self.keys.shape[2], max(0, self.dense_size - added))",
        "newest = self.keys.shape[2]",
        (("MixedRowStore", "keep"),),
        halves,
    ),
    faults.Fault(
        "a code that lost bits stands for the lowest of its levels",
        "stores.recoding",
        "step * ((2**lost - 1) / 2)",
        "step * 0",
        (("test_mixed_cache", "recoded"),),
        codes,
    ),
    faults.Fault(
        "a row of 4 bits in an 8-bit slot is cut down again",
        "stores.recoding",
        "fit = mx.max(grouped, axis=-1) < 2**to",
        "fit = mx.max(grouped, axis=-1) < 0",
        (("test_mixed_cache", "recoded"),),
        codes_given_more_space,
    ),
    faults.Fault(
        "sinks count in every segment",
        "caches.stored_attention",
        "yield segment, part, sinks if last else None",
        "yield segment, part, sinks",
        (("mlx_h2o.caches.stored_attention", "_shared"),),
        merged_with_sinks,
    ),
    faults.Fault(
        "a query that sees nothing gives NaN",
        "caches.stored_attention",
        "shares = mx.where(mx.expand_dims(whole, -1) == -mx.inf, 0.0, shares)",
        "pass",
        (("mlx_h2o.caches.stored_attention", "_merged"),),
        merged_where_all_is_masked,
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_suite_catches(fault, monkeypatch):
    faults.test_the_suite_catches(fault, monkeypatch)
