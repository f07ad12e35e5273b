"""Every variant of the kernels, for the checks that only compile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import mlx.core as mx

from emulator.cases import DTYPES
from mlx_h2o.validate import AttentionRequest, attention_request

# One size of each width of a lane's part; 192/128, where the two sides differ.
SIZES = ((32, 32), (64, 64), (192, 128), (576, 512))


def every_variant() -> Iterator[tuple[str, AttentionRequest]]:
    """A name and a request for each combination of dtypes, mask, sinks and outputs."""
    masks = ("", "causal", "bool", "additive")
    for dtype, mask, sinks, scores, lse in itertools.product(
        DTYPES, masks, (False, True), (False, True), (False, True)
    ):
        sizes = SIZES[(len(mask) + sinks + 2 * scores + lse) % len(SIZES)]
        name = "-".join(
            (
                dtype,
                "x".join(map(str, sizes)),
                mask or "unmasked",
                *(flag for flag, on in (("sinks", sinks), ("scores", scores), ("lse", lse)) if on),
            )
        )
        yield name, request(DTYPES[dtype], sizes, mask, sinks, scores, lse)


def request(
    dtype: mx.Dtype, sizes: tuple[int, int], mask: str, sinks: bool, scores: bool, lse: bool
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
        return_scores=scores,
        return_lse=lse,
    )
