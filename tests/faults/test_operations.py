"""Faults in the composed operations, which define all others: the float64 reference differs."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

import reference
import reference_turbo
from emulator.row_cases import rows_with_ties
from faults.change import (
    argument,
    assigned,
    called,
    condition,
    operator,
    replaced,
    returned,
)
from faults.place import Fault, assert_caught
from golden.build import row_bias
from mlx_h2o import fast, use_backend
from mlx_h2o.operations import turbo

SCALE = 0.25


def arrays(heads: int = 4, length: int = 5, rows: int = 9):
    rng = np.random.default_rng([heads, length, rows])
    shapes = ((2, heads, length, 32), (2, 2, rows, 32), (2, 2, rows, 64))
    return [mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]


def masks():
    """Causal, boolean and additive, with a query that sees nothing and a bias that just masks."""
    seen = np.random.default_rng(1).random((2, 4, 5, 9)) < 0.7
    seen[0, 0, 0] = False
    bias = np.where(seen, np.float32(0.5), np.finfo(np.float32).min)
    return ("causal", mx.array(seen), mx.array(bias))


def same(found, expected) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-4, atol=1e-5)


def attends(**options) -> None:
    q, k, v = arrays()
    with use_backend("composed"):
        found = fast.scaled_dot_product_attention_with_scores(
            q, k, v, scale=SCALE, **options, return_lse=True
        )
    for one, other in zip(found, reference.attention(q, k, v, scale=SCALE, **options), strict=True):
        same(one, other)


def attention() -> None:
    sinks = mx.array([0.5, -1.0, 3.0, -np.inf])
    for mask in masks():
        for given in (None, sinks):
            attends(mask=mask, sinks=given)


def biased() -> None:
    """With NaN in both, where the other masks and where it does not."""
    bias = row_bias(np.random.default_rng(2), (2, 2, 9), nan=True)
    mask = np.array(masks()[2])
    mask[:, :, 3, 4:7] = np.nan
    for other in (None, *masks()[:2], mx.array(mask)):
        attends(mask=other, row_bias=bias)


def packed() -> None:
    q, k, v = arrays(length=1, rows=64)
    rows = [tuple(mx.quantize(each, group_size=32, bits=bits)) for each, bits in ((k, 4), (v, 8))]
    plain = [
        reference.dequantized(*each, bits=bits, group_size=32)
        for each, bits in zip(rows, (4, 8), strict=True)
    ]
    for least in (0.0, 0.01):
        with use_backend("composed"):
            found = fast.scaled_dot_product_attention_quantized_with_scores(
                q, *rows[0], *rows[1], scale=SCALE, bits=4, v_bits=8, group_size=32,
                sparse_v_threshold=least, return_skipped=True,
            )  # fmt: skip
        sparse = {"sparse_v_threshold": least} if least else {}
        expected = reference.attention(q, *plain, scale=SCALE, **sparse)
        same(found[0], expected.out)
        same(found[-1], reference.skipped(expected, least))


def selection() -> None:
    given = rows_with_ties(1, 8, 40)
    for zones in ({}, {"sink_size": 9, "recent_start": 60}):
        for keep in (1, 37, 38, 39, 40):
            with use_backend("composed"):
                found = fast.keep_indices(*given, keep=keep, **zones)
            expected = reference.keep_indices(*given, keep=keep, **zones)
            np.testing.assert_array_equal(np.array(found), expected)


def averages() -> None:
    """One query and several, each with scores that are masked and rows that have no score."""
    for length in (1, 3):
        rng = np.random.default_rng(length)
        before = rng.random((2, 2, 20)).astype(np.float32)
        before[rng.random(before.shape) < 0.4] = np.nan
        for share in (0.0, 0.5):
            scores = rng.standard_normal((2, 4, length, 20)).astype(np.float32)
            scores[rng.random(scores.shape) < share] = -np.inf
            with use_backend("composed"):
                found = fast.accumulate_scores(mx.array(before), mx.array(scores), decay=0.7)
            same(found, reference.accumulate(before, scores, decay=0.7))


def chunks(kind: str) -> None:
    """In one block, and in several."""
    q, k, _ = arrays(length=40, rows=1700)
    sinks = mx.array([0.5, -1.0, 3.0, 0.0]) if kind == "mass" else None
    for mask in ("causal", None):
        options = {"scale": SCALE, "mask": mask, "sinks": sinks}
        with use_backend("composed"):
            found = fast.prefill_scores(q, k, kind=kind, **options)
        whole = reference.attention(q, k, k, **options)
        if kind == "mass":
            same(found, reference.attention_mass(whole.scores, whole.lse, 2))
        else:
            unscored = np.full(k.shape[:3], np.nan)
            same(found, reference.accumulate(unscored, whole.scores, decay=0.95))


def diversity() -> None:
    _, k, _ = arrays()
    k[:, :, 3] = 0
    k[:, :, 4] *= 9
    with use_backend("composed"):
        same(fast.key_diversity(k), reference.key_diversity(k))


def codes() -> None:
    """Rows packed as codes, and attention over them."""
    q, k, v = arrays()
    packed, dense = [], []
    for rows, side in ((k, "keys"), (v, "values")):
        with use_backend("composed"):
            parts = turbo.encode_rows(rows, 3, reference_turbo.SEEDS[side])
        reference_turbo.check_packed(*parts, rows, bits=3, side=side)
        packed += [*parts, None]
        dense.append(reference_turbo.rows(*parts, bits=3, side=side))
    with use_backend("composed"):
        found = fast.scaled_dot_product_attention_quantized_with_scores(
            q, *packed, scale=SCALE, bits=3
        )
    expected = reference.attention(q, *dense, scale=SCALE)
    for one, other in zip(found, expected, strict=False):
        same(one, other)


FAULTS = [
    Fault(
        "queries are not in the basis of the codes of the keys",
        "operations.turbo:turned",
        called("rotated", at=1).becomes("queries"),
        codes,
    ),
    Fault(
        "outputs stay in the basis of the codes of the values",
        "operations.turbo:output",
        called("restored").becomes("out"),
        codes,
    ),
    Fault(
        "the direction of a row is not that of its codes",
        "operations.turbo:rotated",
        called("signs").becomes("1"),
        codes,
    ),
    Fault(
        "queries have the signs of values",
        "operations.turbo:turned",
        argument("rotated", 1, at=1).becomes("VALUES"),
        codes,
    ),
    Fault(
        "outputs have the signs of keys",
        "operations.turbo:output",
        argument("restored", 1).becomes("KEYS"),
        codes,
    ),
    Fault(
        "codes are those of the levels below",
        "operations.turbo:encode_rows",
        operator(">").becomes("found > low"),
        codes,
    ),
    Fault(
        "a norm is that of the row",
        "operations.turbo:encode_rows",
        assigned("norms").becomes("lengths"),
        codes,
    ),
    Fault(
        "bits of a code follow each other from the highest",
        "operations.turbo:encode_rows",
        assigned("places").becomes("mx.arange(bits, dtype=mx.uint32)[::-1]"),
        codes,
    ),
    Fault(
        "rows that are read have no norm",
        "operations.turbo:dense",
        operator("*").becomes("codebook(shape[3], rows.bits)[codes.astype(mx.uint32)]"),
        codes,
    ),
    Fault(
        "a norm leaves out the first element",
        "operations.turbo:encode_rows",
        assigned("norms").becomes("mx.sqrt(mx.sum(mx.square(rows[..., 1:]), -1, keepdims=True))"),
        codes,
    ),
    Fault(
        "a causal query sees one key too many",
        "operations.composed:_masked_pairs",
        assigned("last").becomes("_ + 1"),
        attention,
    ),
    Fault(
        "lowest finite values do not mask",
        "operations.composed:_masked_pairs",
        operator("<=", of="bias").becomes("bias == -mx.inf"),
        attention,
    ),
    Fault(
        "a mask says what is hidden",
        "operations.composed:_masked_pairs",
        argument("where", 0, of="mask", at=1).becomes("~_"),
        attention,
    ),
    Fault(
        "a bias of rows is left out",
        "operations.composed:_logits",
        argument("addmm", 0).becomes("mx.zeros_like(bias)"),
        biased,
    ),
    Fault(
        "a bias of rows masks only where it is infinite",
        "operations.composed:_logits",
        operator("<=").becomes("bias == -mx.inf"),
        biased,
    ),
    Fault(
        "KV heads take each other's bias",
        "operations.composed:_logits",
        assigned("bias").becomes("_[:, ::-1]"),
        biased,
    ),
    Fault(
        "a row that its bias masks meets the NaN of a mask",
        "operations.composed:_logits",
        argument("where", 1).becomes("-mx.inf + found"),
        biased,
    ),
    Fault(
        "the queries are not scaled",
        "operations.composed:_logits",
        operator("*", at=1).becomes("queries"),
        attention,
    ),
    Fault(
        "a query that sees nothing gives NaN",
        "operations.composed:weights",
        returned().becomes("found"),
        attention,
    ),
    Fault(
        "the sink is left out of the denominator",
        "operations.composed:weights",
        condition(of="sinks").becomes("False"),
        attention,
    ),
    Fault(
        "the lse leaves out the sink",
        "operations.composed:_attend",
        called("logaddexp").becomes("lse"),
        attention,
    ),
    Fault(
        "values have the bits of keys",
        "operations.composed:_product",
        argument("quantized_matmul", "bits").becomes("4"),
        packed,
    ),
    Fault(
        "sparse V compares with the largest weight",
        "operations.composed:_attend",
        operator("<").becomes(
            "shares < request.sparse_v_threshold * shares.max(axis=-1, keepdims=True)"
        ),
        packed,
    ),
    Fault(
        "skipped rows are still added",
        "operations.composed:_attend",
        assigned("read", of="where").becomes("shares"),
        packed,
    ),
    Fault(
        "ties go to the higher position",
        "operations.composed:retention_key",
        operator("-").becomes("(ranks.astype(mx.int64) << 32) + place"),
        selection,
    ),
    Fault(
        "sinks reach one row further",
        "operations.composed:retention_key",
        replaced("<", "<=", of="sink_size"),
        selection,
    ),
    Fault(
        "recent rows begin one later",
        "operations.composed:retention_key",
        replaced(">=", ">"),
        selection,
    ),
    Fault(
        "a row without a score ranks with the scored",
        "operations.composed:retention_key",
        argument("where", 1, of="_UNSCORED").becomes("0"),
        selection,
    ),
    Fault(
        "padding has no slot",
        "operations.composed:retention_key",
        assigned("place", of="where").becomes("positions"),
        selection,
    ),
    Fault(
        "minus zero is below zero",
        "operations.composed:_ordered_bits",
        operator("+").becomes("scores"),
        selection,
    ),
    Fault(
        "negative scores in reverse",
        "operations.composed:_ordered_bits",
        operator("^").becomes("bits"),
        selection,
    ),
    Fault(
        "rows are kept in the order of their rank",
        "operations.composed:keep_indices",
        called("sort").becomes("order[..., request.count :]"),
        selection,
    ),
    Fault(
        "masked pairs decay",
        "operations.ema:_one_query",
        returned().becomes("result"),
        averages,
    ),
    Fault(
        "the first score is averaged with 0",
        "operations.ema:_one_query",
        argument("where", 1, of="new", at=1).becomes("(1 - decay) * new"),
        averages,
    ),
    Fault(
        "the queries of a chunk in the wrong order",
        "operations.ema:_many_queries",
        operator("-", of="expand_dims").becomes("so_far - 1"),
        averages,
    ),
    Fault(
        "a row that was scored takes the first score whole",
        "operations.ema:_many_queries",
        called("logical_and").becomes("so_far == 1"),
        averages,
    ),
    Fault(
        "masked heads count in the mean of their group",
        "operations.ema:_group_mean",
        argument("maximum", 0).becomes("group"),
        averages,
    ),
    Fault(
        "blocks of keys know nothing of what was before them",
        "operations.composed_prefill:_causal",
        argument("arange", 0, at=1).becomes("0"),
        partial(chunks, "ema"),
    ),
    Fault(
        "the mass is that of the last block",
        "operations.composed_prefill:_mass",
        operator("+").becomes("weights.reshape(batch, kv_heads, -1, keys).sum(axis=2)"),
        partial(chunks, "mass"),
    ),
    Fault(
        "the last block is left out",
        "operations.composed_prefill:_ranges",
        argument("range", 1).becomes("_ - size"),
        partial(chunks, "mass"),
    ),
    Fault(
        "keys count by their length",
        "operations.composed_cache:diversity",
        called("_normalised", at=1).becomes("keys.astype(mx.float32)"),
        diversity,
    ),
    Fault(
        "a key of zeros has no direction",
        "operations.composed_cache:_normalised",
        called("maximum").becomes("norm"),
        diversity,
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_fault_is_caught(fault: Fault) -> None:
    assert_caught(fault)
