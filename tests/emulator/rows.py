"""Launches on a cache's rows, one for each variant, for checks that only compile."""

import mlx.core as mx

from mlx_h2o.operations.composed import turbo
from mlx_h2o.operations.gpu import launches
from mlx_h2o.operations.gpu.launches import LaunchPlan


def every_row_launch() -> dict[str, LaunchPlan]:
    """A plan of one launch for each variant, by name."""
    seen = LaunchPlan((), {"scores": mx.zeros((1, 4, 2, 5)), "lse": mx.zeros((1, 4, 2))})
    found = {"add_mass": launches.add_mass(seen, mx.zeros((1, 2, 5)))}
    # Each dtype and bits; an element in a lane, some, and the widest row.
    for dtype, size, bits in ((mx.float32, 1024, 4), (mx.float16, 128, 3), (mx.bfloat16, 32, 2)):
        rows = mx.zeros((1, 2, 3, size), dtype)
        found[f"encode_rows-{bits}-{size}"] = launches.encode_rows(rows, bits, turbo.KEYS)
    # Few elements come in another address space.
    for name, count in (("short", 3), ("long", 40)):
        rows_of_head = mx.zeros((1, 2, count)), mx.zeros((1, 2, count), mx.int32)
        found[f"keep_rows-{name}"] = launches.keep_rows(*rows_of_head, count - 1)
    return found
