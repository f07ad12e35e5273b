"""Every variant of the kernels, for the checks that only compile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import mlx.core as mx

from emulator.cases import DTYPES, Case
from mlx_h2o.config import KV_FORMATS
from mlx_h2o.operations.requests import AttentionRequest, attention_request

# One size of each width of a lane's part; 192/128, where the two sides differ.
SIZES = ((32, 32), (64, 64), (192, 128), (576, 512))
MASKS = ("", "causal", "bool", "additive")

# Widths, bits and groups that differ in how a lane's part lies in words and groups.
PACKED = (
    ((64, 64), (8, 8), 64),
    ((128, 128), (4, 4), 32),
    ((96, 192), (6, 3), 32),
    ((128, 128), (8, 4), 128),
    ((576, 512), (4, 8), 64),
    ((96, 96), (5, 2), 32),
)

Variant = tuple[str, AttentionRequest, int | None]


def every_variant() -> Iterator[Variant]:
    """A name, a request and a number of blocks for each combination of kernels and flags."""
    yield from _dense()
    yield from _quantized()
    yield from _codes()


def _dense() -> Iterator[Variant]:
    """In one pass every combination with every dtype; in two, every one with one dtype.

    A bias of rows takes turns, here and with packed rows.
    """
    for index, (mask, *flags) in enumerate(itertools.product(MASKS, *[(False, True)] * 3)):
        for dtype in DTYPES:
            for blocks in (None, 2) if dtype == [*DTYPES][index % 3] else (None,):
                sinks, scores, lse = flags
                sizes = SIZES[(len(mask) + sinks + 2 * scores + lse) % len(SIZES)]
                on = {"sinks": sinks, "scores": scores, "lse": lse, "bias": index % 5 % 2 == 1}
                name = _name(dtype, sizes, mask, blocks, **on)
                yield name, request(DTYPES[dtype], sizes, mask, **on), blocks


def _quantized() -> Iterator[Variant]:
    """Every combination of flags in one pass and in two; dtypes and packings take turns."""
    combinations = itertools.product(MASKS, *[(False, True)] * 4, ("", "sparse", "skipped"))
    for index, (mask, sinks, scores, lse, two, sparse) in enumerate(combinations):
        dtype = [*DTYPES][index % 3]
        sizes, bits, group = PACKED[(index + index // 6) % len(PACKED)]
        blocks = 2 if two else None
        bias = index % 5 % 2 == 1
        flags = {"sinks": sinks, "scores": scores, "lse": lse, sparse or "sparse": bool(sparse)}
        flags["bias"] = bias
        name = _name(dtype, sizes, mask, blocks, **flags)
        case = Case(
            dtype=dtype,
            sizes=sizes,
            heads=(8, 2),
            rows=40,
            mask=f"add-{dtype}" if mask == "additive" else mask,
            sinks=dtype if sinks else "",
            scores=scores,
            lse=lse,
            bits=bits,
            group=group,
            scales=[*DTYPES][index // 3 % 3],
            sparse=1e-6 if sparse else 0.0,
            skipped=sparse == "skipped",
            bias=bias,
        )
        yield f"{name}-bits{bits[0]}.{bits[1]}", case.request(), blocks


def _codes() -> Iterator[Variant]:
    """Every mask and every kind of sparse V in one pass and in two; formats take turns."""
    combinations = itertools.product(MASKS, (False, True), ("", "sparse", "skipped"))
    for index, (mask, two, sparse) in enumerate(combinations):
        dtype = [*DTYPES][index % 3]
        sizes = ((128, 128), (64, 256), (32, 64), (512, 32))[(index + index // 4) % 4]
        kv_format = [*KV_FORMATS][5 * index % len(KV_FORMATS)]
        flags = {"sinks": index % 2 == 1, "lse": index % 4 < 2, "bias": index % 5 % 2 == 1}
        case = Case(
            dtype=dtype,
            sizes=sizes,
            heads=(8, 2),
            rows=40,
            mask=f"add-{dtype}" if mask == "additive" else mask,
            sinks=dtype if flags["sinks"] else "",
            scores=index % 3 > 0,
            lse=flags["lse"],
            kv_format=kv_format,
            sparse=1e-6 if sparse else 0.0,
            skipped=sparse == "skipped",
            bias=flags["bias"],
        )
        flags["scores"] = case.scores
        name = _name(dtype, sizes, mask, 2 if two else None, **flags)
        yield f"{name}-{kv_format}-{sparse or 'all'}", case.request(), 2 if two else None


def _name(dtype: str, sizes: tuple[int, int], mask: str, blocks: int | None, **flags: bool) -> str:
    on = [flag for flag, is_on in flags.items() if is_on]
    two = ["two_pass"] if blocks else []
    return "-".join((dtype, "x".join(map(str, sizes)), mask or "unmasked", *on, *two))


def request(
    dtype: mx.Dtype,
    sizes: tuple[int, int],
    mask: str,
    sinks: bool,
    scores: bool,
    lse: bool,
    bias: bool = False,
) -> AttentionRequest:
    """A request for one variant; an additive mask has the dtype of the queries."""
    heads, rows = 8, 40
    arrays = {
        "causal": "causal",
        "bool": mx.ones((1, heads, 1, rows), mx.bool_),
        "additive": mx.zeros((1, heads, 1, rows), dtype),
    }
    return attention_request(
        mx.zeros((1, heads, 1, sizes[0]), dtype),
        mx.zeros((1, 2, rows, sizes[0]), dtype),
        mx.zeros((1, 2, rows, sizes[1]), dtype),
        scale=1.0,
        mask=arrays.get(mask),
        sinks=mx.zeros((heads,), dtype) if sinks else None,
        row_bias=mx.zeros((1, 2, rows)) if bias else None,
        return_scores=scores,
        return_lse=lse,
    )
