"""The row formats of a cache, and how far a stored row may differ from the given one."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import reference_frame
from mlx_h2o import H2OConfig, policies
from mlx_h2o.caches.cache import evicting_cache
from mlx_h2o.caches.formats import TurboColumn
from mlx_h2o.config import KV_FORMATS
from mlx_h2o.operations.composed import turbo

SIZE = 32
"""Elements of a key and of a value, which form one group."""


@dataclass(frozen=True)
class Column:
    """Settings that choose one row format."""

    settings: dict[str, Any]
    mixed: bool = False
    latents: bool = False


class Codes(NamedTuple):
    """How rows are packed as codes of rotated directions, in place of a number of bits."""

    bits: int
    seed: int


def _packed(**settings: Any) -> dict[str, Any]:
    return {"kv_group_size": SIZE, **settings}


COLUMNS = {
    "dense": Column({}),
    "8 bits": Column(_packed(kv_bits=8)),
    "plain 8 bits": Column(_packed(kv_bits=8, kv_frame=False)),
    "4 bits": Column(_packed(kv_bits=4)),
    "K8 V4": Column(_packed(kv_bits=8, v_bits=4)),
    "8 and 4": Column(_packed(kv_bits=8, light_bits=4, dense_size=3), mixed=True),
    "K8 V4, newest dense": Column(_packed(kv_bits=8, v_bits=4, dense_size=3), mixed=True),
    "published": Column(_packed(kv_bits=8, light_bits=4, dense_size=0), mixed=True),
    "arrays": Column(_packed(kv_bits=8, kv_handed="arrays")),
    "latents": Column(_packed(kv_bits=8, kv_handed="latents"), latents=True),
    "turbo3": Column({"kv_format": "turbo3"}),
    "turbo8v4": Column(_packed(kv_format="turbo8v4")),
    "turbo0v2": Column({"kv_format": "turbo0v2"}),
}


FOLDING = tuple(name for name in policies.names() if policies.known(name)().folds)
"""Policies that change rows by folding, so that tests of unchanged rows do not apply to them."""

EVICTING = tuple(name for name in policies.names() if name not in FOLDING)

POLICY_COLUMNS = [*product(policies.names(), COLUMNS)]
IN_BATCHES = [
    *product(("h2o-ema", "window", "keydiff"), ("dense", "8 bits", "8 and 4")),
    *product(["h2o"], ["dense", "8 bits"]),
]


new_cache = partial(evicting_cache, name="tiny layer 0")
"""An empty cache of the class that the settings ask for."""


def packings(config: H2OConfig) -> tuple[int | Codes | None, int | Codes | None]:
    """How keys and values are packed: bits, codes, or None for dense rows."""
    if config.kv_format is not None:
        bits, v_bits = KV_FORMATS[config.kv_format]
        return {0: None, 8: 8}.get(bits, Codes(bits, turbo.KEYS)), Codes(v_bits, turbo.VALUES)
    return config.kv_bits, config.v_bits or config.kv_bits


def rounded(
    rows: np.ndarray, bits: int | Codes | None, centre: np.ndarray | None = None
) -> np.ndarray:
    """Rows after quantisation, each on its own and once; in a frame around ``centre``."""
    if bits is None or 0 in rows.shape:
        return rows
    if centre is not None:
        kept = rounded(reference_frame.kept(rows, centre), bits)
        return reference_frame.restored(kept, centre)
    if isinstance(bits, Codes):
        column = TurboColumn(*bits, mx.float32)
        lines = mx.array(rows, mx.float32).reshape(1, 1, -1, rows.shape[-1])
        return np.array(column.decode(column.encode(lines))).reshape(rows.shape)
    parts = mx.quantize(mx.array(rows), group_size=SIZE, bits=bits)
    return np.array(mx.dequantize(*parts, group_size=SIZE, bits=bits))


def stored_rows(cache) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [B, H, N, D] in the order of the slots, unpacked, shared ones first."""
    centres = (None, None)
    if cache._table.frame is not None:
        centres = [*map(np.array, cache._table.frame.centres)]
    parts = []
    if cache._table.segments:
        parts = [_unpacked(cache.config, cache.keys_and_values(), centres)]
    if cache.prefix_rows:
        prefix, (keys, values) = cache._table.prefix, cache._table.prefix.view()
        first = prefix.keys.given(keys), prefix.values.given(values)
        first = _unpacked(cache.config, first, centres)
        lines = np.array(cache.positions).shape[0]
        parts.insert(0, [np.broadcast_to(a, (lines, *a.shape[1:])) for a in first])
    keys, values = zip(*parts, strict=True)
    return np.concatenate(keys, axis=2), np.concatenate(values, axis=2)


def _unpacked(config: H2OConfig, sides: Any, centres: Any) -> list[np.ndarray]:
    found = []
    for rows, width, centre in zip(sides, packings(config), centres, strict=True):
        packed = isinstance(rows, tuple)
        if isinstance(rows, tuple) and isinstance(width, Codes):
            rows = TurboColumn(*width, mx.float32).decode(rows)
        elif isinstance(rows, tuple):
            if rows[0].shape[2] == 0:  # MLX refuses empty arrays
                rows = mx.zeros((*rows[1].shape[:3], SIZE))
            else:
                rows = mx.dequantize(*rows, group_size=SIZE, bits=width)
        rows = np.array(rows)
        framed = packed and centre is not None
        found.append(reference_frame.restored(rows, centre) if framed else rows)
    return found


def step_of(row: np.ndarray, bits: int | Codes, centre: np.ndarray | None = None) -> float:
    """The largest error of a row of one group; MLX shifts the scale so that 0 is a level. For codes
    and for rows in a frame, the error spreads over all elements."""
    if centre is not None:
        kept = reference_frame.kept(row[None].astype(np.float32), centre)[0]
        return step_of(kept, bits) * float(np.sqrt(row.size))
    if isinstance(bits, Codes):
        return 2 * float(np.linalg.norm(row)) / 2**bits.bits
    return 1.1 * float(np.ptp(row)) / (2**bits - 1)


def check_mixed(
    found: np.ndarray, came: np.ndarray, dense: bool, coarsest: int, centre: np.ndarray
) -> None:
    """Check a stored row of mixed precision, in a frame: equal to the given one except for rounding
    by the rotations, or within a step of the fewest bits."""
    if dense:
        np.testing.assert_allclose(found, came, rtol=0, atol=2e-6)
    else:
        wrong, step = np.linalg.norm(found - came), step_of(came, coarsest, centre)
        assert wrong <= step, f"{wrong} off, a step of {coarsest} bits is {step}"
