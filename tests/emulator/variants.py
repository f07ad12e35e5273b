"""Every variant of the kernels, for checks that only compile."""

import itertools
from collections.abc import Iterator
from typing import Any

from emulator.cases import DTYPES, Case
from mlx_h2o.config import KV_FORMATS
from mlx_h2o.operations.requests import AttentionRequest

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
OF_CODES = ((128, 128), (64, 256), (32, 64), (512, 32))

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
    for index, (mask, sinks, scores, lse) in enumerate(
        itertools.product(MASKS, *[(False, True)] * 3)
    ):
        for dtype in DTYPES:
            for two in (False, True) if dtype == [*DTYPES][index % 3] else (False,):
                sizes = SIZES[(len(mask) + sinks + 2 * scores + lse) % len(SIZES)]
                on = {"sinks": sinks, "scores": scores, "lse": lse}
                yield _variant(index, two, mask, dtype=dtype, sizes=sizes, **on)


def _quantized() -> Iterator[Variant]:
    """Every combination of flags in one pass and in two; dtypes and packings take turns."""
    combinations = itertools.product(MASKS, *[(False, True)] * 4, ("", "sparse", "skipped"))
    for index, (mask, sinks, scores, lse, two, sparse) in enumerate(combinations):
        sizes, bits, group = PACKED[(index + index // 6) % len(PACKED)]
        packing = {"sizes": sizes, "bits": bits, "group": group}
        packing["scales"] = [*DTYPES][index // 3 % 3]
        on = {"sinks": sinks, "scores": scores, "lse": lse, "sparse": sparse}
        yield _variant(index, two, mask, **on, **packing)


def _codes() -> Iterator[Variant]:
    """Every mask and every kind of sparse V in one pass and in two; formats take turns."""
    combinations = itertools.product(MASKS, (False, True), ("", "sparse", "skipped"))
    for index, (mask, two, sparse) in enumerate(combinations):
        sizes = OF_CODES[(index + index // 4) % len(OF_CODES)]
        kv_format = [*KV_FORMATS][5 * index % len(KV_FORMATS)]
        on = {"sinks": index % 2 == 1, "scores": index % 3 > 0, "lse": index % 4 < 2}
        given = {"sizes": sizes, "kv_format": kv_format, "sparse": sparse}
        yield _variant(index, two, mask, **on, **given)


def _variant(
    index: int, two: bool, mask: str, *, dtype: str = "", sinks: bool, sparse: str = "",
    **given: Any,
) -> Variant:  # fmt: skip
    """Its name begins with the dtype, and names what is not as in a plain call."""
    dtype = dtype or [*DTYPES][index % 3]
    case = Case(
        dtype=dtype, heads=(8, 2), rows=40, mask=f"add-{dtype}" if mask == "additive" else mask,
        sinks=dtype if sinks else "", bias=index % 5 % 2 == 1, sparse=1e-6 if sparse else 0.0,
        skipped=sparse == "skipped", **given,
    )  # fmt: skip
    return f"{dtype}-{case}{'-two passes' * two}", case.request(), 2 if two else None
