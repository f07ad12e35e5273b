"""Random cases of the decode kernels beyond plain attention.

Packed keys and values, sparse V, calls that request no scores, and lengths on both sides of the
boundaries at which a launch changes.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

import reference
from golden.build import DTYPES, Case, additive_mask, generator, row_bias
from mlx_h2o.config import KV_FORMATS
from parity.calls import Call, attention_case, drawn_case

# The combinations that bring both sides of every flag: mask, sinks, scores, lse. Those at even
# places have a bias of rows in one pass, the others in two.
COVERING = (
    ("", False, True, True), ("causal", True, True, False), ("bool", False, False, True),
    ("additive", True, True, True), ("", True, False, False), ("bool", True, True, False),
)  # fmt: skip
# Head sizes, bits of keys and of values, group.
PACKED = (
    ((64, 64), (8, 8), 64), ((64, 32), (4, 4), 32), ((128, 128), (8, 4), 128),
    ((64, 128), (4, 8), 64), ((96, 64), (6, 3), 32), ((128, 128), (2, 5), 128),
)  # fmt: skip
PASSES = {"one-pass": 37, "two-pass": 1030}
# Where the launch takes a second pass, and where the blocks of the widest launch become four.
BLOCK_BOUNDARIES = (1023, 1024, 1025, 2047, 2048, 2049)


def decode_cases(seed: int) -> Iterator[Case]:
    """Every flag in every kernel, then lengths, then codes."""
    for (passes, rows), (index, combination) in itertools.product(
        PASSES.items(), enumerate(COVERING)
    ):
        mask, sinks, scores, lse = combination
        bias = row_bias if (passes == "two-pass") == index % 2 else None
        dtype = [*DTYPES][index % 3]
        case = partial(
            decode_case, rows=rows, dtype=dtype, mask=mask, sinks=sinks, scores=scores, lse=lse,
            bias=bias, queries=1 + index % 3, seed=seed,
        )  # fmt: skip
        flags = f"{passes}-{mask or 'unmasked'}{'-sinks' * sinks}{'-bias' * bool(bias)}"
        flags += "" if lse else "-no-lse"
        if not scores:
            yield case(f"without-scores-{flags}-{dtype}", sizes=(64, 32))
        elif passes == "two-pass":
            yield case(f"{flags}-{dtype}", queries=2, heads=(4, 2), slack=3)
        sizes, bits, group = PACKED[index]
        kind = "packed" if scores else "packed-without-scores"
        packing = f"{bits[0]}.{bits[1]}-g{group}"
        # Sparse V has kernels of its own; the share of skipped rows is asked for or not.
        for sparse, what in ((0.0, ""), (1e-5, "-sparse-skipped" if index % 2 else "-sparse")):
            yield case(
                f"{kind}-{flags}-{packing}{what}-{dtype}", sizes=sizes, bits=bits, group=group,
                sparse=sparse, skipped=what.endswith("skipped"), slack=index % 2,
                scales=[*DTYPES][(index + 1) % 3],
            )  # fmt: skip
    yield from _lengths(seed)
    yield from _row_biases(seed)
    yield from _codes(seed)


def _row_biases(seed: int) -> Iterator[Case]:
    """Cases beyond the flags: counts alone, and NaN that only some queries meet."""
    counts, nan = partial(row_bias, plain=True), partial(row_bias, nan=True)
    dense = partial(attention_case, heads=(4, 2), queries=3, batch=2, seed=seed)
    for dtype, (passes, rows) in itertools.product(("f32", "bf16"), PASSES.items()):
        yield dense(f"bias-counts-{passes}-{dtype}", dtype=dtype, rows=rows, bias=counts)
    for passes, rows in PASSES.items():
        # A NaN of the mask in a row that is masked counts as little as the other way round.
        add = partial(additive_mask, shape=(4, 3, rows), dtype=mx.float16, masked=(-np.inf,),
                      nan=(slice(None), 2, slice(5, 9)))  # fmt: skip
        yield dense(f"bias-nan-additive-{passes}", dtype="f16", rows=rows, mask=add, bias=nan)
        yield decode_case(f"bias-nan-packed-{passes}", rows=rows, mask="bool", queries=3,
                          bits=(8, 8), heads=(4, 2), bias=nan, seed=seed)  # fmt: skip
        yield decode_case(f"bias-nan-sparse-{passes}", rows=rows, mask="causal", queries=3,
                          bits=(4, 8), heads=(4, 2), sinks=True, bias=nan, sparse=1e-5,
                          seed=seed)  # fmt: skip


def _lengths(seed: int) -> Iterator[Case]:
    for mask in ("", "causal", "bool"):  # more queries than a block has
        yield decode_case(f"chunk-{mask}", queries=150, rows=170, heads=(4, 2), mask=mask,
                          bias=row_bias, scores=False, lse=False, seed=seed)  # fmt: skip
    for index, rows in enumerate((1, 31, 32, 33, *BLOCK_BOUNDARIES)):
        dtype = [*DTYPES][index % 3]
        bits = (8, 8) if index % 2 else (4, 4)
        name = f"packed-rows-{rows}-{bits[0]}-{dtype}"
        yield decode_case(name, rows=rows, dtype=dtype, bits=bits, mask="causal" * (index % 2))
    for rows, dtype in zip((2047, 2048, 2049), DTYPES, strict=True):
        yield attention_case(f"boundary-{rows}-{dtype}", dtype=dtype, rows=rows, seed=seed)


def _codes(seed: int) -> Iterator[Case]:
    """Every format of codes, with the flags in turn, in one pass and in two, and with sparse V."""
    each = itertools.product(enumerate(KV_FORMATS), PASSES.items())
    for (index, kv_format), (passes, rows) in each:
        mask, sinks, _, lse = COVERING[(index + (passes == "two-pass")) % len(COVERING)]
        dtype = [*DTYPES][index % 3]
        sizes = ((64, 64), (128, 32), (32, 128))[index % 3]
        make = partial(
            decode_case, rows=rows, dtype=dtype, kv_format=kv_format, mask=mask, sinks=sinks,
            lse=lse, sizes=sizes, group=32, heads=(4, 2), queries=1 + index % 3, slack=index % 2,
            bias=row_bias if index % 2 else None, seed=seed,
        )  # fmt: skip
        name = f"codes-{kv_format}-{passes}-{mask or 'unmasked'}"
        yield make(f"{name}-{dtype}")
        yield make(f"{name}-sparse-{dtype}", sparse=1e-3, skipped=bool(index % 2))
        if index % 4 == 0:
            yield make(f"{name}-without-scores-{dtype}", scores=False)


def decode_case(name: str, *, seed: int = 0, mask: str = "", **given: Any) -> Case:
    """One case of a ``Call``. Expected is float64 attention on the rows as they dequantise; that of
    dense rows with scores is plain attention, which every leg serves."""
    dtype, sparse = given.get("dtype", "f32"), given.get("sparse", 0.0)
    # Sparse V needs pairs to drop, so logits that lie far apart.
    given["scale"] = 0.4 if sparse else None
    given["sinks"] = dtype if given.get("sinks") else ""
    call = Call(mask=f"add-{dtype}" if mask == "additive" else mask, **given)
    fields, tensors, live, arguments = call.made(generator(name, seed))
    q = tensors["queries"]
    expected = reference.attention(q, *live, **arguments)
    narrow = [a if isinstance(a, mx.array) else mx.array(a.astype(np.float32)) for a in live]
    allowed = reference.tolerances(q, *narrow, **arguments, expected=expected)._asdict()
    if sparse:
        expected = reference.attention(q, *live, **arguments, sparse_v_threshold=sparse)
        # A kernel may add pairs that the definition drops.
        dropped = reference.dropped_mass(expected, sparse)
        allowed["out"] += dropped * float(mx.abs(narrow[1]).max())
    results = expected._asdict()
    if call.skipped:
        results["skipped"] = reference.skipped(expected, sparse)
        # A row whose weight is about the threshold is skipped or not.
        edges = [reference.skipped(expected, sparse * (1 + part)) for part in (-1e-4, 1e-4)]
        allowed["skipped"] = 1e-6 + float((edges[1] - edges[0]).max())
    left_out = {"scores": not call.scores, "lse": not call.lse}
    tolerance = {key: allowed[key] for key in results if not left_out.get(key)}
    packed = "quantized" if fields["bits"] else "attention"
    fields |= {"name": name, "op": packed if call.scores else "without_scores"}
    return drawn_case(fields, tensors, results, tolerance)
