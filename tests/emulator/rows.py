"""Launches on a cache's rows, one of each variant, for the checks that only compile."""

from __future__ import annotations

import mlx.core as mx

from emulator.backend import stand_ins
from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.gpu import launch_rows
from mlx_h2o.operations.gpu.launches import LaunchPlan
from mlx_h2o.operations.requests import attention_request


def every_row_launch() -> dict[str, LaunchPlan]:
    """A plan of one launch for each variant, by name."""
    return dict(_launches())


def _encodings():
    """Each dtype and bits; an element in a lane, some, and the widest row."""
    for dtype, size, bits in ((mx.float32, 1024, 4), (mx.float16, 128, 3), (mx.bfloat16, 32, 2)):
        rows = mx.zeros((1, 2, 3, size), dtype)
        yield f"encode_rows-{bits}-{size}", launch_rows.encode_rows(rows, bits, turbo.KEYS)


def _prefills():
    """With every mask, each width of a lane's part, with sinks and without."""
    masks = {
        "": None,
        "causal": "causal",
        "bool": mx.ones((3, 5), mx.bool_),
        "additive": mx.zeros((3, 5), mx.float16),
    }
    for index, (name, mask) in enumerate(masks.items()):
        dtype = (mx.float32, mx.float16, mx.bfloat16)[index % 3]
        size = (32, 64, 192, 576)[index]
        q, k = mx.zeros((1, 4, 3, size), dtype), mx.zeros((1, 2, 5, size), dtype)
        sinks = mx.zeros((4,), dtype) if index % 2 else None
        request = attention_request(q, k, k, scale=1.0, mask=mask, sinks=sinks)
        for each, inputs in stand_ins(launch_rows.prefill_mass(request)):
            given = dict(zip(each.kernel.inputs, inputs, strict=True))
            yield f"{each.kernel.name}-{name or 'unmasked'}", LaunchPlan((each,), given)


def _launches():
    yield from _encodings()
    yield from _prefills()
    # Few elements come in another address space.
    for name, rows in (("short", 3), ("long", 40)):
        rows_of_head = mx.zeros((1, 2, rows)), mx.zeros((1, 2, rows), mx.int32)
        yield f"keep_rows-{name}", launch_rows.keep_rows(*rows_of_head, rows - 1)
